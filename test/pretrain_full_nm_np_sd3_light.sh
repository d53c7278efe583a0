#!/usr/bin/env bash
# SD3-Light pretraining on several machines: --nnodes --nproc_per_node --node_rank --master_ip --master_port.
# --help lists the flags.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh" sd3_light nm_np "$@"
