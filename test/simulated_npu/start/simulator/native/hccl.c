/* A libhccl that takes options. Process groups do not come here: simulator/hccl.py gives them gloo. */
int HcclSetConfig(int config, unsigned long value) { return 0; }
