"""Help, pages of the documentation and the JSON schema, written from the tables."""
