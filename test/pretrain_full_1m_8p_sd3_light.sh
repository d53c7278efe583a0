#!/usr/bin/env bash
# SD3-Light pretraining on one machine, eight devices (--nproc_per_node overrides); with no model and no data, the demo.
# --help lists the flags.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh" sd3_light 1m_8p "$@"
