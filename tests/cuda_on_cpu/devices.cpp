// The CUDA runtime's devices, STANDIN_DEVICES of them, and its errors.
#include "work.hpp"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {
thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;
}  // namespace

namespace standin {
int number(const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text && *text ? std::atoi(text) : otherwise;
}

std::size_t total_memory() {
    static const std::size_t bytes = (std::size_t)number("STANDIN_MIB", 4096) << 20;
    return bytes;
}

int said(int error) {
    if (error != cudaSuccess) last_error = (cudaError_t)error;
    return error;
}

// Those that CUDA_VISIBLE_DEVICES leaves, by their numbers in the machine; up to the first that is none of it.
static const std::vector<int>& visible() {
    static const std::vector<int> found = [] {
        const int all = number("STANDIN_DEVICES", 1);
        std::vector<int> numbers;
        const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
        for (int index = 0; !text && index < all; ++index) numbers.push_back(index);
        for (char* end; text && *text; text = *end == ',' ? end + 1 : end) {
            const long index = std::strtol(text, &end, 10);
            if (end == text || index < 0 || index >= all) break;
            numbers.push_back((int)index);
        }
        return numbers;
    }();
    return found;
}

int device_count() { return (int)visible().size(); }

int number_in_machine(int device) { return visible()[(std::size_t)device]; }

int current_device() { return current; }

void set_current_device(int device) { current = device; }
}  // namespace standin

using namespace standin;

extern "C" {
cudaError_t cudaGetDeviceCount(int* count) {
    *count = device_count();
    return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) { return *device = current_device(), cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
    set_current_device(device);
    return cudaSuccess;
}
cudaError_t cudaInitDevice(int, unsigned, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceReset() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
    count(Counted::host_waits);
    return wait_for_device(current_device()), cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidValue:
            return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation:
            return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidDevice:
            return "cudaErrorInvalidDevice";
        case cudaErrorNoDevice:
            return "cudaErrorNoDevice";
        case cudaErrorInvalidResourceHandle:
            return "cudaErrorInvalidResourceHandle";
        case cudaErrorNotReady:
            return "cudaErrorNotReady";
        case cudaErrorPeerAccessAlreadyEnabled:
            return "cudaErrorPeerAccessAlreadyEnabled";
        default:
            return "cudaErrorOfTheStandIn";
    }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor:
            *value = 9;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = 0;
            break;
        case cudaDevAttrMaxThreadsPerBlock:
            *value = 1024;
            break;
        case cudaDevAttrMaxGridDimX:
            *value = 2147483647;
            break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ:
            *value = 65535;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = 49152;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = 2;
            break;
        case cudaDevAttrWarpSize:
            *value = 32;
            break;
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrManagedMemory:
        case cudaDevAttrMemoryPoolsSupported:
            *value = 1;
            break;
        default:
            *value = 0;
    }
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
    std::memset(properties, 0, sizeof *properties);
    std::snprintf(properties->name, sizeof properties->name, "CPU in place of a GPU");
    std::memset(properties->uuid.bytes, 0x5a, 16);
    properties->uuid.bytes[15] = (char)number_in_machine(device);
    properties->totalGlobalMem = total_memory();
    properties->major = 9;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->multiProcessorCount = 2;
    properties->sharedMemPerBlock = 49152;
    properties->pciBusID = number_in_machine(device) + 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
    std::snprintf(text, (std::size_t)size, "0000:%02x:00.0", number_in_machine(device) + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    if (device >= device_count() || peer >= device_count()) return failed(cudaErrorInvalidDevice);
    return *can = device != peer, cudaSuccess;  // as CUDA says of a device and itself
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceDisablePeerAccess(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetLimit(std::size_t* value, cudaLimit) { return *value = 0, cudaSuccess; }
cudaError_t cudaDeviceSetLimit(cudaLimit, std::size_t) { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
}
