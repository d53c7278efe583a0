"""Files and processes, for every room: one durable write, and one way to tell whether another process still lives."""
