"""Pure maths: counter-based draws, keyed permutations, the DDPM process, moving averages. No I/O, no device names."""
