"""One file or folder a family: its facts and its maths. registry.py says which there are; nothing else imports them."""
