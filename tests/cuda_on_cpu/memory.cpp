// The CUDA runtime's memory: what the host and a GPU have, copies between them, and handles for other processes.
//
// A GPU's memory is a file without a name, which other processes can open. It is not initialized, it can run out
// (STANDIN_MIB), and it is unmapped when it is freed.
#include "work.hpp"

#include <cuda_runtime_api.h>

#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

using namespace standin;

namespace {
// Never destroyed: threads work on the streams until the process is gone.
std::mutex& mutex = *new std::mutex;
std::map<std::uintptr_t, Memory>& memories = *new std::map<std::uintptr_t, Memory>;
std::size_t used = 0;

cudaError_t allocate(void** address, std::size_t size, Kind kind) {
    *address = nullptr;
    if (!size) return cudaSuccess;
    const bool on_device = kind != Kind::host;
    const std::size_t mapped = (size + 4095) / 4096 * 4096;
    std::unique_lock<std::mutex> lock(mutex);
    if (on_device && used + mapped > total_memory()) return failed(cudaErrorMemoryAllocation);
    const int file = kind == Kind::device ? memfd_create("standin", MFD_CLOEXEC) : -1;
    if (kind == Kind::device && (file < 0 || ftruncate(file, (off_t)mapped))) return failed(cudaErrorMemoryAllocation);
    const int how = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* made = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, how, file, 0);
    if (made == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    std::memset(made, 0xcb, mapped);  // what was there before
    memories[(std::uintptr_t)made] = {(std::uintptr_t)made, size, mapped, kind, current_device(), file};
    if (on_device) used += mapped;
    count(on_device ? Counted::allocations : Counted::pinned_allocations);
    *address = made;
    return cudaSuccess;
}

void forget(std::map<std::uintptr_t, Memory>::iterator found) {
    const Memory memory = found->second;
    memories.erase(found);
    if (memory.kind != Kind::host && memory.kind != Kind::peer) used -= memory.mapped;
    munmap((void*)memory.begin, memory.mapped);
    if (memory.file >= 0) close(memory.file);
}

// Give memory back when the GPU is done with everything; a peer's with cudaIpcCloseMemHandle, not otherwise.
cudaError_t release(void* address, bool is_host, bool is_peer) {
    if (!address) return cudaSuccess;
    Memory memory;
    if (!find(address, &memory) || memory.begin != (std::uintptr_t)address) return failed(cudaErrorInvalidValue);
    if ((memory.kind == Kind::host) != is_host || (memory.kind == Kind::peer) != is_peer)
        return failed(cudaErrorInvalidValue);
    wait_for_device(memory.device);
    std::unique_lock<std::mutex> lock(mutex);
    forget(memories.find(memory.begin));
    return cudaSuccess;
}

// Whether the bytes may be used: all within one piece of memory, or in none that CUDA knows.
bool is_whole(const void* address, std::size_t size) {
    Memory memory;
    return !find(address, &memory) || (std::uintptr_t)address + size <= memory.begin + memory.size;
}

bool is_known(const void* address) {
    Memory memory;
    return find(address, &memory);
}

void count_copy(bool from_device, bool to_device, std::size_t size) {
    if (from_device && to_device) {
        count(Counted::copies_on_device);
        count(Counted::bytes_on_device, size);
    } else if (from_device) {
        count(Counted::copies_to_host);
        count(Counted::bytes_to_host, size);
    } else if (to_device) {
        count(Counted::copies_to_device);
        count(Counted::bytes_to_device, size);
    }
}

cudaError_t copy(void* target, const void* source, std::size_t size, cudaMemcpyKind kind, Stream* stream, bool waits) {
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    if (!size) return cudaSuccess;
    const bool from_device = is_on_device(source), to_device = is_on_device(target);
    const bool wants_source = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    const bool wants_target = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (wants_source != from_device || wants_target != to_device))
        return failed(cudaErrorInvalidValue);
    if (!is_whole(source, size) || !is_whole(target, size)) return failed(cudaErrorInvalidValue);
    count_copy(from_device, to_device, size);
    if (to_device && !from_device && !is_known(source)) {  // taken from pageable memory before this returns
        auto held = std::make_shared<std::vector<char>>((const char*)source, (const char*)source + size);
        const auto task = put(stream, [=] { std::memcpy(target, held->data(), size); });
        if (waits) wait_on_host(task);
        return cudaSuccess;
    }
    const auto task = put(stream, [=] { std::memmove(target, source, size); });
    if (waits ? !(from_device && to_device) : !to_device && !is_known(target)) wait_on_host(task);
    return cudaSuccess;
}

cudaError_t fill(void* target, int value, std::size_t size, Stream* stream) {
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    if (!is_on_device(target) || !is_whole(target, size)) return failed(cudaErrorInvalidValue);
    count(Counted::fills);
    put(stream, [=] { std::memset(target, value, size); });
    return cudaSuccess;
}

// A handle stands for a whole allocation, wherever in it the address is.
struct Handle {
    std::int32_t process, file;
    std::uint64_t size;
};
}  // namespace

bool standin::find(const void* address, Memory* found) {
    std::unique_lock<std::mutex> lock(mutex);
    auto next = memories.upper_bound((std::uintptr_t)address);
    if (next == memories.begin()) return false;
    *found = (--next)->second;
    return (std::uintptr_t)address < found->begin + found->size;
}

bool standin::is_on_device(const void* address) {
    Memory memory;
    return find(address, &memory) && memory.kind != Kind::host;
}

extern "C" {
cudaError_t cudaMalloc(void** address, std::size_t size) { return allocate(address, size, Kind::device); }
cudaError_t cudaFree(void* address) { return release(address, false, false); }
cudaError_t cudaMallocManaged(void** address, std::size_t size, unsigned) {
    return allocate(address, size, Kind::managed);
}
cudaError_t cudaHostAlloc(void** address, std::size_t size, unsigned) { return allocate(address, size, Kind::host); }
cudaError_t cudaMallocHost(void** address, std::size_t size) { return allocate(address, size, Kind::host); }
cudaError_t cudaFreeHost(void* address) { return release(address, true, false); }
cudaError_t cudaMallocAsync(void** address, std::size_t size, cudaStream_t) {
    return allocate(address, size, Kind::pooled);
}
cudaError_t cudaMallocFromPoolAsync(void** address, std::size_t size, cudaMemPool_t, cudaStream_t) {
    return allocate(address, size, Kind::pooled);
}
cudaError_t cudaFreeAsync(void* address, cudaStream_t handle) {
    Stream* stream = stream_of(handle);
    if (!stream) return failed(cudaErrorInvalidResourceHandle);
    if (!address) return cudaSuccess;
    put(stream, [=] {
        std::unique_lock<std::mutex> lock(mutex);
        const auto found = memories.find((std::uintptr_t)address);
        if (found != memories.end()) forget(found);
    });
    return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return *pool = (cudaMemPool_t)1, cudaSuccess; }
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int) { return *pool = (cudaMemPool_t)1, cudaSuccess; }
cudaError_t cudaDeviceSetMemPool(int, cudaMemPool_t) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
    return *(std::uint64_t*)value = 0, cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
    std::unique_lock<std::mutex> lock(mutex);
    *total = total_memory();
    *free_bytes = *total - used;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
    std::memset(found, 0, sizeof *found);
    found->device = -2;
    found->hostPointer = (void*)address;
    Memory memory;
    if (!find(address, &memory)) return cudaSuccess;
    found->device = memory.device;
    found->type = memory.kind == Kind::host      ? cudaMemoryTypeHost
                  : memory.kind == Kind::managed ? cudaMemoryTypeManaged
                                                 : cudaMemoryTypeDevice;
    found->devicePointer = (void*)address;
    if (found->type == cudaMemoryTypeDevice) found->hostPointer = nullptr;
    return cudaSuccess;
}
cudaError_t cudaMemAdvise(const void*, std::size_t, cudaMemoryAdvise, cudaMemLocation) { return cudaSuccess; }
cudaError_t cudaMemPrefetchAsync(const void*, std::size_t, cudaMemLocation, unsigned, cudaStream_t) {
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* target, const void* source, std::size_t size, cudaMemcpyKind kind) {
    return copy(target, source, size, kind, stream_of(nullptr), true);
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return copy(target, source, size, kind, stream_of(stream), false);
}
cudaError_t cudaMemcpyPeer(void* target, int, const void* source, int, std::size_t size) {
    return copy(target, source, size, cudaMemcpyDefault, stream_of(nullptr), true);
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, std::size_t size, cudaStream_t stream) {
    return copy(target, source, size, cudaMemcpyDefault, stream_of(stream), false);
}
cudaError_t cudaMemset(void* target, int value, std::size_t size) {
    return fill(target, value, size, stream_of(nullptr));
}
cudaError_t cudaMemsetAsync(void* target, int value, std::size_t size, cudaStream_t stream) {
    return fill(target, value, size, stream_of(stream));
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
    Memory memory;
    if (!find(address, &memory) || memory.kind != Kind::device) return failed(cudaErrorInvalidValue);
    const Handle made = {getpid(), memory.file, memory.mapped};
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &made, sizeof made);
    return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
    Handle told;
    std::memcpy(&told, &handle, sizeof told);
    if (told.process == getpid()) return failed(cudaErrorDeviceUninitialized);
    const std::string path = "/proc/" + std::to_string(told.process) + "/fd/" + std::to_string(told.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return failed(cudaErrorInvalidValue);
    void* made = mmap(nullptr, told.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (made == MAP_FAILED) return close(file), failed(cudaErrorMapBufferObjectFailed);
    std::unique_lock<std::mutex> lock(mutex);
    memories[(std::uintptr_t)made] = {(std::uintptr_t)made, told.size, told.size, Kind::peer, current_device(), file};
    *address = made;
    return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* address) { return release(address, false, true); }
}
