"""The one training loop, its state and its hooks.

The way of a run:
 1. door.py         what a training command does once its words are read: describe the run, or train
 2. check.py        all that can be known to be wrong before a device is touched
 3. session.py      the folder is claimed and the checkpoint to resume is chosen; run_dir.py where a run has a folder of
                    its own, shared_checkpoint.py where machines must agree
 4. run.py          assembles data, model, engine, averages and outputs into the state of state.py
 5. loop.py         step after step, and the hooks between them: evaluating.py, kid.py, drawing.py, saving.py,
                    reporting.py; triggers.py is what else asks for a save or samples
 6. meter.py        reads losses and memory where a line is due; outputs.py and run_log.py write them
 7. averages.py     the averaged weights beside it; streams.py brings weights together for one writer
 8. finalize.py     last export, last checkpoint, report
inference/ draws without training, estimate/ foresees a run, diagnosis/ explains a bad step; inspect/ and dump.py show
the data.
"""
