// A libcuda.so.1 that launches nothing: it keeps what the last launch was given.  Sizes are in bytes.
#include <stdint.h>
#include <string.h>

enum { CONFIG = 56, ATTRIBUTE = 72, ATTRIBUTES = 4, PARAMETERS = 256, BYTES = 128 };

int stub_launches, stub_bound, stub_encoded;  // launches, calls of cuCtxSetCurrent, descriptors
int stub_mixes;                               // whether descriptors have their addresses in other bytes, too
static int sizes[PARAMETERS], count;          // what to keep of each parameter of a launch
static int failure, failures;                 // the code that the next launches, or encoded descriptors, return
unsigned char stub_config[CONFIG];            // CUlaunchConfig
unsigned char stub_attributes[ATTRIBUTE * ATTRIBUTES];
unsigned char stub_values[PARAMETERS][BYTES];

void stub_expect(int n, const int *bytes) { memcpy(sizes, bytes, sizeof(int) * (count = n)); }
void stub_fail(int code, int times) { failure = code, failures = times; }

int cuLaunchKernelEx(const char *config, void *function, void **parameters, void **extra) {
  if (failures > 0) return failures--, failure;
  stub_launches++;
  unsigned attributes;
  memcpy(&attributes, config + 48, sizeof attributes);
  memset(stub_attributes, 0, sizeof stub_attributes);
  memset(stub_values, 0, sizeof stub_values);
  memcpy(stub_config, config, CONFIG - 4);    // the last four are padding too
  memcpy(stub_attributes, *(void **)(config + 40), attributes * ATTRIBUTE);
  memset(stub_config + 28, 0, 4), memset(stub_config + 40, 0, 8);  // padding, an address
  for (unsigned i = 0; i < attributes; i++) memset(stub_attributes + i * ATTRIBUTE + 4, 0, 4);
  for (int i = 0; i < count; i++) memcpy(stub_values[i], parameters[i], sizes[i]);
  return 0;
}

int cuTensorMapEncodeTiled(unsigned char *map, int dtype, uint32_t rank, void *address, const uint64_t *shape,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  if (failures > 0) return failures--, failure;
  if ((uintptr_t)map % 64 || (uintptr_t)address % 16) return 1;
  stub_encoded++;
  memset(map, 0, BYTES);
  if (stub_mixes) map[BYTES - 1] = (uintptr_t)address >> 4;
  int facts[] = {dtype, rank, interleave, swizzle, promotion, fill};
  memcpy(map, &address, 8), memcpy(map + 8, facts, 24);
  for (uint32_t i = 0; i < rank; i++) {       // numbers below 2**32 are all that tests use
    uint32_t kept[] = {shape[i], i + 1 < rank ? strides[i] : 0, box[i], steps[i]};
    memcpy(map + 32 + 16 * i, kept, 16);
  }
  return 0;
}

int cuGetErrorString(int code, const char **text) { return *text = "an error of the stub", 0; }
int cuCtxSetCurrent(void *context) { return stub_bound++, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)16, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 227 << 10, 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuModuleLoadData(void **module, const void *data) { return *module = (void *)16, 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return *function = (void *)16, 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { return *value = attribute ? 0 : 1024, 0; }

#define NOTHING(name) int name(void) { return 0; }
NOTHING(cuInit) NOTHING(cuDevicePrimaryCtxRetain) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig)
NOTHING(cuPointerGetAttribute) NOTHING(cuPointerGetAttributes) NOTHING(cuTensorMapEncodeIm2col) NOTHING(cuLaunchKernel)
NOTHING(cuOccupancyMaxActiveClusters) NOTHING(cuCtxSetLimit) NOTHING(cuCtxGetLimit) NOTHING(cuDeviceGetCount)
NOTHING(cuCtxGetDevice) NOTHING(cuModuleUnload) NOTHING(cuMemAlloc_v2) NOTHING(cuStreamIsCapturing)
NOTHING(cuTensorMapEncodeIm2colWide)
