// A libascendcl in which host memory is device memory: N devices, a memory limit for each, and everything done at once.
//
// Compiled against the ACL headers of the torch_npu wheel, so that a signature that changes is a compile error.
// What a caller may do without (profiling, graphs, shared memory) is absent or returns an error; operators launched by
// name always return an error, because an operator that "succeeds" without computing is a wrong result without a trace.
#include <sys/mman.h>
#include <time.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "acl/error_codes/rt_error_codes.h"

namespace {

constexpr size_t kAlign = 512;            // of device pointers
constexpr size_t kGranularity = 2 << 20;  // of physical memory

struct Stream {
  int device;
  int id;
};

struct Event {
  timespec at{};
};

struct Physical {
  int device;
  size_t size;
};

struct Block {
  int device;  // -1: pinned host memory
  size_t size;
};

struct Mapping {
  int device;
  size_t size;
};

long number(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtol(text, nullptr, 10) : otherwise;
}

// The devices that ASCEND_RT_VISIBLE_DEVICES leaves visible: as with the runtime, the list ends at the first wrong one.
int visible() {
  static const int found = [] {
    const int present = static_cast<int>(number("SIMULATED_NPU_DEVICES", 1));
    const char* text = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (!text) return present;
    int count = 0;
    for (const char* at = text; *at;) {
      char* end = nullptr;
      const long id = strtol(at, &end, 10);
      if (end == at || id < 0 || id >= present) break;
      ++count;
      if (*end != ',') break;
      at = end + 1;
    }
    return count;
  }();
  return found;
}

size_t limit() {
  static const size_t bytes = [] {
    const char* text = getenv("SIMULATED_NPU_MEMORY_GIB");
    return static_cast<size_t>((text && *text ? strtod(text, nullptr) : 64.0) * (1ul << 30));
  }();
  return bytes;
}

std::mutex lock;
std::vector<size_t>& used() {
  static std::vector<size_t> bytes(visible() + 1, 0);
  return bytes;
}
std::map<const char*, Block> blocks;      // by first byte
std::map<const char*, size_t> reserved;   // address ranges
std::map<const char*, Mapping> mappings;  // parts of them with memory behind
std::atomic<int> streams{0};
std::atomic<int> saturating{-1};  // -1: nobody asked
std::atomic<long> synchronised{0};

thread_local int current = -1;

bool take(int device, size_t size) {
  std::lock_guard<std::mutex> held(lock);
  if (used()[device] + size > limit()) return false;
  used()[device] += size;
  return true;
}

void give(int device, size_t size) {
  std::lock_guard<std::mutex> held(lock);
  used()[device] -= size;
}

int* context(int device) {
  static std::vector<int> devices = [] {
    std::vector<int> made(visible() + 1);
    for (size_t i = 0; i < made.size(); ++i) made[i] = static_cast<int>(i);
    return made;
  }();
  return &devices[device];
}

aclError waited() {
  ++synchronised;
  return ACL_SUCCESS;
}

aclError copy(void* dst, size_t room, const void* src, size_t count) {
  if (count > room) return ACL_ERROR_INVALID_PARAM;
  memmove(dst, src, count);
  return ACL_SUCCESS;
}

const Block* block_of(const void* pointer) {  // lock is held
  auto after = blocks.upper_bound(static_cast<const char*>(pointer));
  if (after == blocks.begin()) return nullptr;
  --after;
  const bool inside = static_cast<const char*>(pointer) < after->first + after->second.size;
  return inside ? &after->second : nullptr;
}

aclError allocate(void** pointer, size_t size, int device) {
  const size_t room = (size + kAlign - 1) / kAlign * kAlign;
  if (device >= 0 && !take(device, room)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  if (posix_memalign(pointer, device >= 0 ? kAlign : 4096, room ? room : kAlign)) {
    if (device >= 0) give(device, room);
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  std::lock_guard<std::mutex> held(lock);
  blocks[static_cast<char*>(*pointer)] = Block{device, room};
  return ACL_SUCCESS;
}

aclError release(void* pointer) {
  Block block;
  {
    std::lock_guard<std::mutex> held(lock);
    auto found = blocks.find(static_cast<char*>(pointer));
    if (found == blocks.end()) return ACL_ERROR_INVALID_PARAM;
    block = found->second;
    blocks.erase(found);
  }
  if (block.device >= 0) give(block.device, block.size);
  free(pointer);
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

// What the simulator's kernels and tests ask of this library.
long simulated_npu_waits() { return synchronised; }
int simulated_npu_saturates() { return saturating; }
int simulated_npu_is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  const Block* block = block_of(pointer);
  return block && block->device < 0;
}

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclGetRecentErrMsg() { return "simulated NPU"; }
const char* aclrtGetSocName() { return "Ascend910B3"; }
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

// ---------------------------------------------------------------- devices

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(visible());
  return visible() ? ACL_SUCCESS : ACL_ERROR_RT_NO_DEVICE;
}
aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= visible()) return ACL_ERROR_RT_INVALID_DEVICEID;
  current = device;
  return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
aclError aclrtGetDevice(int32_t* device) {
  if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = current;
  return ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext* found) {
  if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *found = context(current);
  return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext wanted) {
  current = *static_cast<int*>(wanted);
  return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  *active = device == current;
  return ACL_SUCCESS;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
  *logic = user;
  return ACL_SUCCESS;
}
aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = 0;
  return ACL_SUCCESS;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo what, int64_t* value) {
  *value = what == ACL_DEVICE_INFO_AI_CORE_NUM ? 20 : what == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? 40 : 192 << 20;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr what, int64_t* value) {
  switch (static_cast<int>(what)) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = 20; return ACL_SUCCESS;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = 40; return ACL_SUCCESS;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = static_cast<int64_t>(limit()); return ACL_SUCCESS;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = 192 << 20; return ACL_SUCCESS;
    default: return ACL_ERROR_API_NOT_SUPPORT;
  }
}
aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo* info) {
  *info = aclrtUtilizationInfo{0, 0, 0, 0, nullptr};
  return ACL_SUCCESS;
}
aclError aclGetCannAttribute(aclCannAttr what, int32_t* value) {
  *value = what == ACL_CANN_ATTR_INF_NAN || what == ACL_CANN_ATTR_BF16 || what == ACL_CANN_ATTR_JIT_COMPILE;
  return ACL_SUCCESS;
}
aclError aclGetCannAttributeList(const aclCannAttr** list, size_t* count) {
  static const aclCannAttr known[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
  *list = known;
  *count = 3;
  return ACL_SUCCESS;
}
aclError aclsysGetVersionStr(char*, char* text) {
  const char* cann = getenv("SIMULATED_NPU_CANN");
  strcpy(text, cann && *cann ? cann : "8.5.0");
  return ACL_SUCCESS;
}
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  memset(version, 0, sizeof(*version));
  aclsysGetVersionStr(nullptr, version->version);
  const char* parts[3] = {"0", "0", "0"};
  std::string text = version->version;
  int count = 0;
  for (char* part = strtok(text.data(), "."); part && count < 3; part = strtok(nullptr, ".")) parts[count++] = part;
  strncpy(version->majorVersion, parts[0], sizeof(version->majorVersion) - 1);
  strncpy(version->minorVersion, parts[1], sizeof(version->minorVersion) - 1);
  strncpy(version->releaseVersion, parts[2], sizeof(version->releaseVersion) - 1);
  return ACL_SUCCESS;
}
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  saturating = mode == ACL_RT_OVERFLOW_MODE_SATURATION;
  return ACL_SUCCESS;
}
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

// ---------------------------------------------------------------- memory

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  std::lock_guard<std::mutex> held(lock);
  *total = limit();
  *free = limit() - used()[current < 0 ? 0 : current];
  return ACL_SUCCESS;
}
aclError aclrtMalloc(void** pointer, size_t size, aclrtMemMallocPolicy) {
  return allocate(pointer, size, current < 0 ? 0 : current);
}
aclError aclrtMallocAlign32(void** pointer, size_t size, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(pointer, size, policy);
}
aclError aclrtFree(void* pointer) { return release(pointer); }
aclError aclrtMallocHost(void** pointer, size_t size) { return allocate(pointer, size, -1); }
aclError aclrtMallocHostWithCfg(void** pointer, uint64_t size, aclrtMallocConfig*) {
  return allocate(pointer, size, -1);
}
aclError aclrtFreeHost(void* pointer) { return release(pointer); }
aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::lock_guard<std::mutex> held(lock);
  const Block* block = block_of(pointer);
  attributes->location.id = 0;
  attributes->location.type = !block              ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                              : block->device < 0 ? ACL_MEM_LOCATION_TYPE_HOST
                                                  : ACL_MEM_LOCATION_TYPE_DEVICE;
  return ACL_SUCCESS;
}
aclError aclrtReserveMemAddress(void** pointer, size_t size, size_t, void*, uint64_t) {
  void* range = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  std::lock_guard<std::mutex> held(lock);
  reserved[static_cast<char*>(range)] = size;
  *pointer = range;
  return ACL_SUCCESS;
}
aclError aclrtReleaseMemAddress(void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto found = reserved.find(static_cast<char*>(pointer));
  if (found == reserved.end()) return ACL_ERROR_INVALID_PARAM;
  munmap(pointer, found->second);
  reserved.erase(found);
  return ACL_SUCCESS;
}
aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp* asked, uint64_t) {
  const int device = static_cast<int>(asked->location.id);
  if (device < 0 || device >= visible()) return ACL_ERROR_RT_INVALID_DEVICEID;
  const size_t room = (size + kGranularity - 1) / kGranularity * kGranularity;
  if (!take(device, room)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  *handle = new Physical{device, room};
  return ACL_SUCCESS;
}
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* physical = static_cast<Physical*>(handle);
  give(physical->device, physical->size);
  delete physical;
  return ACL_SUCCESS;
}
aclError aclrtMapMem(void* pointer, size_t size, size_t, aclrtDrvMemHandle handle, uint64_t) {
  if (mprotect(pointer, size, PROT_READ | PROT_WRITE)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  std::lock_guard<std::mutex> held(lock);
  mappings[static_cast<char*>(pointer)] = Mapping{static_cast<Physical*>(handle)->device, size};
  return ACL_SUCCESS;
}
aclError aclrtUnmapMem(void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto found = mappings.find(static_cast<char*>(pointer));
  if (found == mappings.end()) return ACL_ERROR_INVALID_PARAM;
  madvise(pointer, found->second.size, MADV_DONTNEED);
  mprotect(pointer, found->second.size, PROT_NONE);
  mappings.erase(found);
  return ACL_SUCCESS;
}
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*) {
  return ACL_ERROR_API_NOT_SUPPORT;
}
aclError aclrtMemImportFromShareableHandle(uint64_t, int32_t, aclrtDrvMemHandle*) { return ACL_ERROR_API_NOT_SUPPORT; }
aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) { return ACL_ERROR_API_NOT_SUPPORT; }
aclError aclrtMemcpy(void* dst, size_t room, const void* src, size_t count, aclrtMemcpyKind) {
  ++synchronised;
  return copy(dst, room, src, count);
}
aclError aclrtMemcpyAsync(void* dst, size_t room, const void* src, size_t count, aclrtMemcpyKind, aclrtStream) {
  return copy(dst, room, src, count);
}
aclError aclrtMemset(void* pointer, size_t, int32_t value, size_t count) {
  memset(pointer, value, count);
  return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void* pointer, size_t, int32_t value, size_t count, aclrtStream) {
  memset(pointer, value, count);
  return ACL_SUCCESS;
}

// ---------------------------------------------------------------- streams and events: all that was asked is done

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  *stream = new Stream{current, streams++};
  return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
aclError aclrtDestroyStream(aclrtStream stream) {
  delete static_cast<Stream*>(stream);
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream ? static_cast<Stream*>(stream)->id : -1;
  return ACL_SUCCESS;
}
aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  *flag = 0;
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeStream(aclrtStream) { return waited(); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return waited(); }
aclError aclrtSynchronizeDevice() { return waited(); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return waited(); }
aclError aclrtSynchronizeEvent(aclrtEvent) { return waited(); }
aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  *event = new Event{};
  return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
  clock_gettime(CLOCK_MONOTONIC, &static_cast<Event*>(event)->at);
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* ms, aclrtEvent first, aclrtEvent last) {
  const timespec &a = static_cast<Event*>(first)->at, &b = static_cast<Event*>(last)->at;
  *ms = static_cast<float>((b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6);
  return ACL_SUCCESS;
}
aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void* arguments) {
  function(arguments);
  return ACL_SUCCESS;
}
aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType, aclrtStream) {
  function(data);
  return ACL_SUCCESS;
}
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtProcessReport(int32_t) { return ACL_SUCCESS; }

}  // extern "C"
