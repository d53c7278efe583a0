#!/usr/bin/env bash
# SD3-Light pretraining on one machine, one device; with no model and no data, the embedded demo: cache, train, sample, report.
# --help lists the flags.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh" sd3_light 1m_1p "$@"
