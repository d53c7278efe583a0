"""Pure maths. No I/O, no device names.

The way of a training target:
 1. permutation.py  which sample comes when, in closed form
 2. draws.py        counter-based random draws: noise, timesteps, dropout
 3. ddpm.py, flow.py   the noised sample, its target and its weight, of a DDPM or a rectified flow
 4. losses.py       the loss of one sample
 5. rounding.py     fp32 values in 16 bits, for weights that are kept so
 6. ema.py          moving averages of the weights
"""
