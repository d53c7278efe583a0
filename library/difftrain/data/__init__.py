"""Data: from files of pictures to micro batches, every choice a pure function of the draws.

The way of a picture:
 1. sources/       what a folder, tar or table holds, as records
 2. index/         every usable record of the configured data, built once, opened in constant time
 3. plan/          buckets, and which uses of which records form global batch k, in closed form
 4. recipe.py      how the samples of one source are made, as the data set's file says
 5. media/         bytes decoded, cut, resized, mirrored, and the masks beside them
 6. captions.py    the caption of one use
 7. samples.py     one sample, and a batch of them with the host draws; features.py takes what is cached instead
 8. loader.py      worker processes that make batch n of a rank
prepare.py puts 1 to 3 together for a run; evaluation_sets.py does the same for what is measured
on: the held-out part of the training set, and sets with data of their own.
"""
