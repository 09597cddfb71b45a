// The CUDA runtime that a CUDA build of torch finds when this library is preloaded: one GPU whose
// memory is the host's. Tests only. Memory, copies, streams and events work, at once and in order;
// no kernel of torch's can run (aten.py computes its ops on the CPU), and those of mixprec are
// compiled for the CPU (build.py).
#include <cuda_runtime_api.h>  // not the cuda_runtime.h beside this folder

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace {

constexpr size_t kMemory = size_t{8} << 30;
constexpr unsigned char kPoison = 0xFF;  // NaN in every float format

thread_local cudaError_t last_error = cudaSuccess;
std::atomic<uintptr_t> next_handle{0x1000};
std::mutex mutex;
std::map<char*, size_t> allocations;  // by first byte
size_t used = 0;

template <class T, class Value>
cudaError_t give(T* to, Value value) {
  *to = static_cast<T>(value);
  return cudaSuccess;
}

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

using Time = std::chrono::steady_clock::time_point;  // of an event, which is reached at once

std::atomic<long> launches;  // of kernels, and ops of torch, each of which counts as one

// What a capture records, and what a graph's launch runs.
using Work = std::vector<std::function<void()>>;
std::unique_ptr<Work> captured;  // while there is a capture, on this stream
cudaStream_t captured_stream = nullptr;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

bool captures(cudaStream_t stream) { return captured && stream == captured_stream; }

cudaError_t run_or_record(cudaStream_t stream, std::function<void()> work) {
  if (captures(stream)) {
    captured->push_back(std::move(work));
  } else {
    work();
  }
  return cudaSuccess;
}

// What waits for the device, or may wait, has no place in a capture.
cudaError_t wait(bool in_capture) {
  return result(in_capture ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}
bool unsafe() { return captured && mode != cudaStreamCaptureModeRelaxed; }

bool on_device(const void* p) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = allocations.upper_bound(const_cast<char*>(static_cast<const char*>(p)));
  if (after == allocations.begin()) return false;
  --after;
  return static_cast<const char*>(p) < after->first + after->second;
}

cudaError_t new_handle(cudaStream_t* to) {
  return give(to, reinterpret_cast<cudaStream_t>(next_handle += 16));
}

}  // namespace

extern "C" {

// The device.

cudaError_t cudaGetDeviceCount(int* count) { return give(count, 1); }
cudaError_t cudaGetDevice(int* device) { return give(device, 0); }
cudaError_t cudaSetDevice(int device) {
  return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceSynchronize() { return wait(captured != nullptr); }
cudaError_t cudaDriverGetVersion(int* version) { return give(version, CUDART_VERSION); }
cudaError_t cudaRuntimeGetVersion(int* version) { return give(version, CUDART_VERSION); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return give(can, 0); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int device) {
  if (device != 0) return result(cudaErrorInvalidDevice);
  std::memset(of, 0, sizeof(*of));
  std::strcpy(of->name, "a GPU on the CPU");
  of->totalGlobalMem = kMemory;
  of->sharedMemPerBlock = 48 << 10;
  of->sharedMemPerBlockOptin = 227 << 10;
  of->sharedMemPerMultiprocessor = 228 << 10;
  of->regsPerBlock = of->regsPerMultiprocessor = 65536;
  of->warpSize = 32;
  of->maxThreadsPerBlock = 1024;
  of->maxThreadsPerMultiProcessor = 2048;
  of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
  of->maxThreadsDim[2] = 64;
  of->maxGridSize[0] = 2147483647;
  of->maxGridSize[1] = of->maxGridSize[2] = 65535;
  of->major = 9;
  of->multiProcessorCount = 4;
  of->l2CacheSize = 50 << 20;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrComputeCapabilityMajor) return give(value, 9);
  if (attribute == cudaDevAttrMultiProcessorCount) return give(value, 4);
  return give(value, attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 << 10 : 0);
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  std::snprintf(id, length, "0000:00:00.0");
  return cudaSuccess;
}

// Errors.

cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t) { return "an error of the GPU on the CPU"; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the GPU on the CPU";
}

// Memory.

cudaError_t cudaMalloc(void** memory, size_t size) {
  if (unsafe()) return result(cudaErrorStreamCaptureUnsupported);
  std::lock_guard<std::mutex> lock(mutex);
  size_t whole = (size + 511) / 512 * 512;
  if (used + whole > kMemory) return result(cudaErrorMemoryAllocation);
  *memory = std::aligned_alloc(512, whole);
  std::memset(*memory, kPoison, whole);
  allocations[static_cast<char*>(*memory)] = whole;
  used += whole;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = allocations.find(static_cast<char*>(memory));
  if (found != allocations.end()) {
    used -= found->second;
    std::free(memory);
    allocations.erase(found);
  }
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> lock(mutex);
  *free = kMemory - used;
  *total = kMemory;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned) {
  return give(memory, std::aligned_alloc(512, (size + 511) / 512 * 512));
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* p) {
  std::memset(of, 0, sizeof(*of));
  of->type = on_device(p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  of->devicePointer = of->hostPointer = const_cast<void*>(p);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  if (unsafe()) return result(cudaErrorStreamCaptureUnsupported);
  std::memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  return run_or_record(stream, [=] { std::memmove(to, from, size); });
}
cudaError_t cudaMemset(void* at, int value, size_t size) {
  std::memset(at, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t size, cudaStream_t stream) {
  return run_or_record(stream, [=] { std::memset(at, value, size); });
}

// Streams and events: everything is done when the call returns.

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_handle(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return new_handle(stream);
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return give(priority, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait(captures(stream)); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return give(event, reinterpret_cast<cudaEvent_t>(new Time{}));
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Time*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<Time*>(event) = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t) { return wait(unsafe()); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait(unsafe()); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t last) {
  std::chrono::duration<float, std::milli> between =
      *reinterpret_cast<Time*>(last) - *reinterpret_cast<Time*>(first);
  *ms = between.count();
  return cudaSuccess;
}

// Graphs: on one stream, which is also the order of the work.

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  std::swap(mode, *other);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return give(status,
              captures(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  if (id != nullptr) *id = captures(stream) ? reinterpret_cast<uintptr_t>(captured.get()) : 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (captured || stream == nullptr) return result(cudaErrorStreamCaptureUnsupported);
  captured = std::make_unique<Work>();
  captured_stream = stream;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (!captures(stream)) return result(cudaErrorStreamCaptureUnmatched);
  *graph = reinterpret_cast<cudaGraph_t>(captured.release());
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  return give(count, reinterpret_cast<Work*>(graph)->size());
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                          unsigned long long) {
  return give(exec, reinterpret_cast<cudaGraphExec_t>(new Work(*reinterpret_cast<Work*>(graph))));
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
  for (const std::function<void()>& work : *reinterpret_cast<Work*>(exec)) work();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Work*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete reinterpret_cast<Work*>(exec);
  return cudaSuccess;
}

// For what computes on this device: whether `stream` is being captured, and then the work to do at
// each launch of the graph. `drop` frees `what` when the last graph that holds it is gone.
// Asked before each of them: so their number is counted here.
int gpu_on_cpu_captures(cudaStream_t stream) {
  launches++;
  return captures(stream);
}
long gpu_on_cpu_launches() { return launches; }
void gpu_on_cpu_set_launches(long count) { launches = count; }
void gpu_on_cpu_record(void (*run)(void*), void (*drop)(void*), void* what) {
  std::shared_ptr<void> held(what, drop);
  captured->push_back([run, held] { run(held.get()); });
}

// Kernels of torch's own: known, but not run.

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(void** kernel, const void* entry) {
  return give(kernel, const_cast<void*>(entry));
}
cudaError_t __cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return result(cudaErrorNoKernelImageForDevice);
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return result(cudaErrorNoKernelImageForDevice);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return result(cudaErrorNoKernelImageForDevice);
}
}
