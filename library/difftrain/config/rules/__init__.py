"""What must hold between fields: a file a subject; findings name fields, and the door spells them."""
