// The driver, under whose name the library of cudart.cpp is found as well: torch asks it for the
// state of the device's context, and needs the other functions to be there. Their arguments do not
// matter, so no header of CUDA's is included.
extern "C" {

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "the GPU on the CPU has no driver";
  return 0;
}

int cuCtxGetCurrent() { return 801; }
int cuCtxSetCurrent() { return 801; }
int cuDeviceGet() { return 801; }
int cuDeviceGetAttribute() { return 801; }
int cuDevicePrimaryCtxRetain() { return 801; }
int cuFuncGetAttribute() { return 801; }
int cuFuncSetAttribute() { return 801; }
int cuFuncSetCacheConfig() { return 801; }
int cuLaunchCooperativeKernel() { return 801; }
int cuLaunchKernel() { return 801; }
int cuLinkAddData_v2() { return 801; }
int cuLinkComplete() { return 801; }
int cuLinkCreate_v2() { return 801; }
int cuModuleGetFunction() { return 801; }
int cuModuleLoad() { return 801; }
int cuModuleLoadData() { return 801; }
int cuModuleLoadDataEx() { return 801; }
int cuModuleUnload() { return 801; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor() { return 801; }
int cuPointerGetAttribute() { return 801; }
int cuTensorMapEncodeTiled() { return 801; }
}
