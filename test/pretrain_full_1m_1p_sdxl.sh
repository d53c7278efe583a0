#!/usr/bin/env bash
# SDXL pretraining on one machine, one device; with no model and no data, the embedded demo. --help lists the flags.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh" sdxl 1m_1p "$@"
