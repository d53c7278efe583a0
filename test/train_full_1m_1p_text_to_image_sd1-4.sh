#!/usr/bin/env bash
# The Stable Diffusion 1.4 baseline on one machine, one device: 101 steps of train_text_to_image.py, the time
# of step 100, the loss of step 101; with no model and no data, a small demo. --help lists the flags.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh" text_to_image_sd1-4 1m_1p "$@"
