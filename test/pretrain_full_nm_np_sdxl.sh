#!/usr/bin/env bash
# SDXL pretraining on several machines: --nnodes --nproc_per_node --node_rank --master_ip --master_port; with no model and no data, the embedded demo. --help lists the flags.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh" sdxl nm_np "$@"
