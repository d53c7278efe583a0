"""What a run fetches from a hub and sends to one, through huggingface_hub; HF_ENDPOINT, HF_HOME and the like count.

The way of an id:
 1. ids.py          which fields name something on a hub, and which files of it are needed
 2. client.py       the one client, with limits on waiting and errors in plain words
 3. repository.py   a name becomes a commit, its files come to this machine
 4. fetch.py        all of them at the start of a run; paths take the place of the ids
 5. identify.py     the family of weights, from a few small files, before anything large is fetched
 6. uploads.py      exports and states go out
"""
