"""What a run fetches from a hub and sends to one, through huggingface_hub; HF_ENDPOINT, HF_HOME and the like count."""
