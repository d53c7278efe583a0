/* Plain symbols that libtorch_npu.so must find when it is loaded. Each refuses: none of them computes anything here. */
#define REFUSES(name) \
  int name(void) { return 200001; } /* ACL_ERROR_API_NOT_SUPPORT */
#define NOTHING(name) \
  void *name(void) { return 0; }

REFUSES(aclopCompileAndExecute)
REFUSES(aclopSetAttrBool)
REFUSES(aclopSetAttrDataType)
REFUSES(aclopSetAttrFloat)
REFUSES(aclopSetAttrInt)
REFUSES(aclopSetAttrListBool)
REFUSES(aclopSetAttrListFloat)
REFUSES(aclopSetAttrListInt)
REFUSES(aclopSetAttrListListInt)
REFUSES(aclopSetAttrString)
NOTHING(aclopCreateAttr)
NOTHING(aclopDestroyAttr)
NOTHING(aclCreateDataBuffer)
int aclDestroyDataBuffer(void) { return 0; }
NOTHING(aclCreateTensorDesc)
NOTHING(aclDestroyTensorDesc)
REFUSES(aclGetTensorDescDimV2)
REFUSES(aclGetTensorDescFormat)
NOTHING(aclGetTensorDescNumDims)
REFUSES(aclGetTensorDescType)
NOTHING(aclSetTensorDescName)
REFUSES(aclSetTensorFormat)
REFUSES(aclSetTensorPlaceMent)
REFUSES(aclSetTensorShape)
REFUSES(aclmdlInitDump)
REFUSES(aclmdlSetDump)
REFUSES(aclmdlFinalizeDump)
REFUSES(aclrtBinaryGetFunction)
REFUSES(aclrtBinaryLoadFromData)
REFUSES(aclrtGetFunctionAddr)
REFUSES(rtDevBinaryRegister)
REFUSES(rtFunctionRegister)
REFUSES(rtGetC2cCtrlAddr)
REFUSES(rtKernelLaunch)

/* The profiler's hooks are told of everything, and keep nothing. */
NOTHING(MsprofGetHashId)
NOTHING(MsprofRegisterCallback)
NOTHING(MsprofReportAdditionalInfo)
NOTHING(MsprofReportApi)
NOTHING(MsprofReportCompactInfo)
NOTHING(MsprofSysCycleTime)
