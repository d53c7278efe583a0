"""Pictures from bytes: decoded, cut, resized, mirrored, coloured; and masks."""
