// What a CUDA-aware MPI asks of the driver: whose memory a pointer is, copies, streams, events and inter-process
// memory.
//
// The runtime of the stand-in does it; its handles are the driver's. Events of other processes are not there.
#include "work.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <initializer_list>

using namespace standin;

namespace {
CUresult code(cudaError_t error) { return (CUresult)error; }

CUresult tell(void* data, CUpointer_attribute attribute, CUdeviceptr address, bool* is_known) {
    Memory memory;
    *is_known = find((void*)address, &memory);
    const bool is_host = *is_known && memory.kind == Kind::host;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(unsigned*)data = !*is_known ? 0 : is_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_CONTEXT:
            *(CUcontext*)data = *is_known ? (CUcontext)(std::uintptr_t)(memory.device + 1) : nullptr;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
            *(unsigned*)data = *is_known && memory.kind == Kind::managed;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *(int*)data = *is_known ? memory.device : -2;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            *(CUdeviceptr*)data = address;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
            *(unsigned long long*)data = *is_known ? memory.begin : 0;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
            *(unsigned*)data = *is_known && memory.kind == Kind::device;
            return CUDA_SUCCESS;
        default:
            return CUDA_ERROR_INVALID_VALUE;
    }
}
}  // namespace

extern "C" {
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
    bool is_known;
    const CUresult told = tell(data, attribute, address, &is_known);
    return is_known ? told : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data, CUdeviceptr address) {
    bool is_known;
    for (unsigned i = 0; i < count; ++i)
        if (const CUresult error = tell(data[i], attributes[i], address, &is_known)) return error;
    return CUDA_SUCCESS;
}
CUresult cuPointerSetAttribute(const void*, CUpointer_attribute, CUdeviceptr) { return CUDA_SUCCESS; }
CUresult cuMemAlloc(CUdeviceptr* address, std::size_t size) { return code(cudaMalloc((void**)address, size)); }
CUresult cuMemFree(CUdeviceptr address) { return code(cudaFree((void*)address)); }
CUresult cuMemHostRegister(void*, std::size_t, unsigned) { return CUDA_SUCCESS; }
CUresult cuMemHostUnregister(void*) { return CUDA_SUCCESS; }
CUresult cuMemGetAddressRange(CUdeviceptr* begin, std::size_t* size, CUdeviceptr address) {
    Memory memory;
    if (!find((void*)address, &memory)) return CUDA_ERROR_NOT_FOUND;
    if (begin) *begin = memory.begin;
    if (size) *size = memory.size;
    return CUDA_SUCCESS;
}
CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, std::size_t size) {
    return code(cudaMemcpy((void*)target, (void*)source, size, cudaMemcpyDefault));
}
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, std::size_t size, CUstream stream) {
    return code(cudaMemcpyAsync((void*)target, (void*)source, size, cudaMemcpyDefault, stream));
}
CUresult cuMemcpyHtoD(CUdeviceptr target, const void* source, std::size_t size) {
    return cuMemcpy(target, (CUdeviceptr)source, size);
}
CUresult cuMemcpyDtoH(void* target, CUdeviceptr source, std::size_t size) {
    return cuMemcpy((CUdeviceptr)target, source, size);
}
CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return code(cudaStreamCreateWithFlags(stream, flags)); }
CUresult cuStreamDestroy(CUstream stream) { return code(cudaStreamDestroy(stream)); }
CUresult cuStreamSynchronize(CUstream stream) { return code(cudaStreamSynchronize(stream)); }
CUresult cuStreamQuery(CUstream stream) { return code(cudaStreamQuery(stream)); }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    return code(cudaStreamWaitEvent(stream, event, flags));
}
CUresult cuEventCreate(CUevent* event, unsigned flags) { return code(cudaEventCreateWithFlags(event, flags)); }
CUresult cuEventDestroy(CUevent event) { return code(cudaEventDestroy(event)); }
CUresult cuEventRecord(CUevent event, CUstream stream) { return code(cudaEventRecord(event, stream)); }
CUresult cuEventQuery(CUevent event) { return code(cudaEventQuery(event)); }
CUresult cuEventSynchronize(CUevent event) { return code(cudaEventSynchronize(event)); }
CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
    return code(cudaIpcGetMemHandle((cudaIpcMemHandle_t*)handle, (void*)address));
}
CUresult cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
    cudaIpcMemHandle_t same;
    std::memcpy(&same, &handle, sizeof same);
    return code(cudaIpcOpenMemHandle((void**)address, same, flags));
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) { return code(cudaIpcCloseMemHandle((void*)address)); }
CUresult cuIpcGetEventHandle(CUipcEventHandle*, CUevent) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuIpcOpenEventHandle(CUevent*, CUipcEventHandle) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
    return code(cudaDeviceCanAccessPeer(can, device, peer));
}
}
