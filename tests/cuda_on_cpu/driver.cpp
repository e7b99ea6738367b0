// The CUDA driver over host memory: devices, and modules that nvrtc.cpp has made.
#include "kernel.hpp"
#include "work.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

using namespace standin;

extern "C" {
CUresult cuInit(unsigned) { return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult code, const char** text) {
    *text = code ? "CUDA_ERROR_OF_THE_STAND_IN" : "CUDA_SUCCESS";
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult code, const char** text) { return cuGetErrorName(code, text); }
CUresult cuDeviceGetCount(int* count) { return *count = device_count(), CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int index) {
    if (index < 0 || index >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
    return *device = index, CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    cudaDeviceProp properties;
    const cudaError_t error = cudaGetDeviceProperties(&properties, device);
    return *uuid = properties.uuid, (CUresult)error;
}
#undef cuDeviceGetUuid
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }
CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
    return (CUresult)cudaDeviceGetPCIBusId(text, size, device);
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
            *value = 9;
            break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
            *value = 2;
            break;
        case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
            *value = -1;
            break;
        default:
            *value = 0;
    }
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
    return *context = (CUcontext)(std::uintptr_t)(current_device() + 1), CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { return *device = current_device(), CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
CUresult cuStreamGetCtx(CUstream, CUcontext* context) { return cuCtxGetCurrent(context); }

// An image is "STANDIN", the length of a shared library in 16 digits, and the library.
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    const char* text = (const char*)image;
    if (std::memcmp(text, "STANDIN", 7)) return CUDA_ERROR_INVALID_IMAGE;
    const std::size_t size = std::stoull(std::string(text + 7, 16));
    const int file = memfd_create("standin-kernels", MFD_CLOEXEC);
    if (file < 0 || write(file, text + 23, size) != (ssize_t)size) return CUDA_ERROR_OUT_OF_MEMORY;
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return std::fprintf(stderr, "stand-in: %s\n", dlerror()), CUDA_ERROR_INVALID_IMAGE;
    // The file stays open: another one of the same number would be taken for it.
    *module = (CUmodule)library;
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }  // work on a stream may still need it
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    const std::string symbol = std::string("standin_kernel_") + name;
    *function = (CUfunction)dlsym(module, symbol.c_str());
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuModuleGetGlobal(CUdeviceptr* address, std::size_t* size, CUmodule module, const char* name) {
    *address = (CUdeviceptr)dlsym(module, name);
    *size = 0;
    return *address ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, std::size_t) {
    return *blocks = 2, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction, CUoccupancyB2DSize, std::size_t, int) {
    return *grid = 4, *block = 128, CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream handle, void** arguments,
                        void**) {
    Stream* stream = stream_of(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    const std::size_t threads = (std::size_t)block_x * block_y * block_z;
    if (!threads || threads > 1024 || !grid_x || !grid_y || !grid_z) return CUDA_ERROR_INVALID_VALUE;
    const auto* kernel = (const Kernel*)function;
    void* taken = kernel->take(arguments);
    count(Counted::launches);
    const Launch launch = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared};
    put(stream, [=] {
        kernel->run(taken, launch);
        kernel->drop(taken);
    });
    return CUDA_SUCCESS;
}
}
