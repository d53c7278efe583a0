"""What a run looks at to say what went wrong, or where two runs part.

1. `module_calls` watches what the modules of a model read and make.
2. `tracing` writes it (`--trace`); `non_finite` names the first module whose output or gradient is not finite.
3. `first_batch` looks at what frozen encoders make of the first one.
4. `out_of_memory` says what to change where a device is full.
"""
