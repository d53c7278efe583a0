#!/usr/bin/env bash
# SD3-Light's cache stage on every device of one machine: encodes images and captions once, and trains nothing.
# --help lists the flags.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh" sd3_light_cache 1m_np "$@"
