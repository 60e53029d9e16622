/* What Triton calls of NVIDIA's driver, without a GPU: a launch calls a function of the test's. */

typedef void (*Launched)(long function, const unsigned *sizes, void **parameters);

static Launched launched;
static long handles;

void tell(Launched function) { launched = function; }

#define NOTHING(name) int name(void) { return 0; }
#define NUMBER(name, value) int name(int *given) { return *given = value, 0; }
#define HANDLE(name) int name(long *given) { return *given = ++handles, 0; }

NOTHING(cuInit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxSetLimit)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuModuleUnload)
NOTHING(cuTensorMapEncodeTiled)
NOTHING(cuTensorMapEncodeIm2col)
NUMBER(cuCtxGetDevice, 0)
NUMBER(cuDeviceGet, 0)
NUMBER(cuDeviceGetCount, 1)
NUMBER(cuDriverGetVersion, 13000)
NUMBER(cuDeviceGetAttribute, 1 << 17) /* bytes of shared memory, most of all */
NUMBER(cuFuncGetAttribute, 1024)      /* threads of a program, most of all */
NUMBER(cuOccupancyMaxActiveClusters, 1)
HANDLE(cuCtxGetCurrent)
HANDLE(cuCtxGetLimit)
HANDLE(cuDevicePrimaryCtxRetain)
HANDLE(cuModuleLoadData)
HANDLE(cuModuleGetFunction)

int cuGetErrorString(int error, const char **given) { return *given = "refused", 0; }
int cuStreamIsCapturing(void *stream, int *given) { return *given = 0; }

/* Every address is one of the device's. */
int cuPointerGetAttribute(long *given, int which, long address) { return *given = address, 0; }

/* The sizes are three of the grid, three of a program, and the bytes of its shared memory. */
int cuLaunchKernelEx(const unsigned *sizes, long function, void **parameters, void **extra) {
    return launched(function, sizes, parameters), 0;
}
