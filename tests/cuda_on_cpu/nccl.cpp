// NCCL between processes of one host: ranks meet in a file in /dev/shm, on their streams.
#include "half.hpp"
#include "work.hpp"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <random>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

using namespace standin;

namespace {
enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { MOST_RANKS = 8 };
const std::size_t CHUNK = 1 << 20;
enum { SUM = 0, PROD = 1, MAX = 2, MIN = 3 };

struct Meeting {
    std::atomic<unsigned> joined, arrived, round;
    std::atomic<int> devices[MOST_RANKS];
    alignas(64) char chunks[MOST_RANKS][CHUNK];
};

struct Ranks {
    Meeting* meeting;
    int rank, size, device;
    std::string path;
    std::atomic<bool> is_aborted{false};
};

struct UniqueId {
    char text[128];
};

// Whether all came; false after an abort.
bool meet(Ranks* communicator) {
    Meeting* meeting = communicator->meeting;
    const unsigned round = meeting->round;
    if (meeting->arrived.fetch_add(1) + 1 == (unsigned)communicator->size) {
        meeting->arrived = 0;
        meeting->round = round + 1;
        return true;
    }
    while (meeting->round == round) {
        if (communicator->is_aborted) return false;
        usleep(50);
    }
    return true;
}

template <class T>
T combined(T a, T b, int op) {
    switch (op) {
        case SUM:
            return (T)(a + b);
        case PROD:
            return (T)(a * b);
        case MAX:
            return a < b ? b : a;
        default:
            return b < a ? b : a;
    }
}

// 16-bit floats: each operation is made in float, and rounded.
template <float FROM(unsigned short), unsigned short OF(double)>
struct Narrow {
    unsigned short bits;
    Narrow() = default;
    explicit Narrow(float value) : bits(OF(value)) {}
    operator float() const { return FROM(bits); }
};
float of_brain(unsigned short bits) {
    const std::uint32_t wide = (std::uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}
unsigned short brain_of(double given) {
    const float value = (float)given;  // a float before
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
typedef Narrow<half_to_float, half_of> Half;
typedef Narrow<of_brain, brain_of> Brain;

// Combine all ranks' `source` into the `target` of `root`; of every rank for a root of -1.
template <class T>
void reduce(Ranks* communicator, const char* source, char* target, std::size_t size, int op, int root) {
    Meeting* meeting = communicator->meeting;
    const std::size_t most = CHUNK / sizeof(T);
    for (std::size_t done = 0; done < size; done += most) {
        const std::size_t count = std::min(most, size - done);
        T* mine = (T*)meeting->chunks[communicator->rank];
        std::memcpy(mine, source + done * sizeof(T), count * sizeof(T));
        if (!meet(communicator)) return;
        for (std::size_t i = 0; i < count && (root < 0 || root == communicator->rank); ++i) {
            T total = ((T*)meeting->chunks[0])[i];
            for (int rank = 1; rank < communicator->size; ++rank)
                total = combined<T>(total, ((T*)meeting->chunks[rank])[i], op);
            ((T*)target)[done + i] = total;
        }
        if (!meet(communicator)) return;
    }
}

// Write the `source` of each rank, of so many bytes, one after the other to `target`; only that of `root`, if not -1.
void gather(Ranks* communicator, const char* source, char* target, std::size_t bytes, int root) {
    Meeting* meeting = communicator->meeting;
    for (std::size_t done = 0; done < bytes; done += CHUNK) {
        const std::size_t count = std::min(CHUNK, bytes - done);
        if (root < 0 || root == communicator->rank)
            std::memcpy(meeting->chunks[communicator->rank], source + done, count);
        if (!meet(communicator)) return;
        for (int rank = 0; rank < communicator->size; ++rank)
            if (root < 0 || root == rank)
                std::memcpy(target + (root < 0 ? rank * bytes : 0) + done, meeting->chunks[rank], count);
        if (!meet(communicator)) return;
    }
}

typedef void (*Reduction)(Ranks*, const char*, char*, std::size_t, int, int);

struct Type {
    std::size_t bytes;
    Reduction reduce;
};

// What a type of NCCL is; no function for one that is not there.
Type type_of(int type) {
    switch (type) {
        case 0:
            return {1, reduce<std::int8_t>};
        case 1:
            return {1, reduce<std::uint8_t>};
        case 2:
            return {4, reduce<std::int32_t>};
        case 3:
            return {4, reduce<std::uint32_t>};
        case 4:
            return {8, reduce<std::int64_t>};
        case 5:
            return {8, reduce<std::uint64_t>};
        case 6:
            return {2, reduce<Half>};
        case 9:
            return {2, reduce<Brain>};
        case 7:
            return {4, reduce<float>};
        case 8:
            return {8, reduce<double>};
        default:
            return {0, nullptr};
    }
}

// Put work on a stream, if the arguments are such as NCCL takes.
int begin(void* handle, const void* source, const void* target, std::function<void()> work) {
    Stream* stream = stream_of(handle);
    if (!stream || !is_on_device(source) || !is_on_device(target)) return INVALID_ARGUMENT;
    count(Counted::nccl_calls);
    put(stream, std::move(work));
    return SUCCESS;
}
}  // namespace

extern "C" {
int ncclGetVersion(int* version) { return *version = 22700, SUCCESS; }
const char* ncclGetErrorString(int result) { return result ? "an error of the stand-in" : "no error"; }
int ncclGetUniqueId(UniqueId* id) {
    std::random_device random;
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->text, sizeof id->text, "/dev/shm/standin-nccl-%08x%08x", random(), random());
    return SUCCESS;
}
int ncclCommInitRankConfig(void** made, int size, UniqueId id, int rank, void*) {
    if (size > MOST_RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
    const int file = open(id.text, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(Meeting))) return SYSTEM_ERROR;
    void* mapped = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return SYSTEM_ERROR;
    auto* communicator = new Ranks;
    communicator->meeting = (Meeting*)mapped;
    communicator->rank = rank;
    communicator->size = size;
    communicator->device = current_device();
    communicator->path = id.text;
    communicator->meeting->devices[rank] = number_in_machine(communicator->device);
    ++communicator->meeting->joined;
    while (communicator->meeting->joined < (unsigned)size) usleep(50);
    unlink(id.text);
    for (int a = 0; a < size; ++a)
        for (int b = 0; b < a; ++b)  // as NCCL has it: one rank a GPU
            if (communicator->meeting->devices[a] == communicator->meeting->devices[b]) return INVALID_USAGE;
    *made = communicator;
    return SUCCESS;
}
int ncclCommInitRank(void** made, int size, UniqueId id, int rank) {
    return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}
int ncclCommInitAll(void**, int, const int*) { return INVALID_USAGE; }
int ncclCommDestroy(void* given) {
    wait_for_device(((Ranks*)given)->device);
    munmap(((Ranks*)given)->meeting, sizeof(Meeting));
    return SUCCESS;
}
int ncclCommAbort(void* given) { return ((Ranks*)given)->is_aborted = true, SUCCESS; }
int ncclCommGetAsyncError(void*, int* result) { return *result = SUCCESS, SUCCESS; }
int ncclCommCount(void* given, int* count) { return *count = ((Ranks*)given)->size, SUCCESS; }
int ncclCommCuDevice(void* given, int* device) { return *device = ((Ranks*)given)->device, SUCCESS; }
int ncclCommUserRank(void* given, int* rank) { return *rank = ((Ranks*)given)->rank, SUCCESS; }
int ncclCommSplit(void*, int, int, void**, void*) { return INVALID_USAGE; }
int ncclGroupStart() { return SUCCESS; }
int ncclGroupEnd() { return SUCCESS; }
int ncclReduce(const void* source, void* target, std::size_t size, int type, int op, int root, void* given,
               void* stream) {
    auto* communicator = (Ranks*)given;
    const auto work = type_of(type).reduce;
    if (!work || root >= communicator->size || op > MIN) return INVALID_ARGUMENT;
    return begin(stream, source, target,
                 [=] { work(communicator, (const char*)source, (char*)target, size, op, root); });
}
int ncclAllReduce(const void* source, void* target, std::size_t size, int type, int op, void* given, void* stream) {
    return ncclReduce(source, target, size, type, op, -1, given, stream);
}
int ncclReduceScatter(const void* source, void* target, std::size_t size, int type, int op, void* given, void* stream) {
    auto* communicator = (Ranks*)given;
    const Type kind = type_of(type);
    if (!kind.reduce || op > MIN) return INVALID_ARGUMENT;
    return begin(stream, source, target, [=] {
        for (int root = 0; root < communicator->size; ++root)
            kind.reduce(communicator, (const char*)source + root * size * kind.bytes, (char*)target, size, op, root);
    });
}
int ncclBroadcast(const void* source, void* target, std::size_t size, int type, int root, void* given, void* stream) {
    auto* communicator = (Ranks*)given;
    const std::size_t bytes = size * type_of(type).bytes;
    if (!type_of(type).reduce || root < 0 || root >= communicator->size) return INVALID_ARGUMENT;
    return begin(stream, source, target,
                 [=] { gather(communicator, (const char*)source, (char*)target, bytes, root); });
}
int ncclBcast(void* buffer, std::size_t size, int type, int root, void* given, void* stream) {
    return ncclBroadcast(buffer, buffer, size, type, root, given, stream);
}
int ncclAllGather(const void* source, void* target, std::size_t size, int type, void* given, void* stream) {
    auto* communicator = (Ranks*)given;
    const std::size_t bytes = size * type_of(type).bytes;
    if (!type_of(type).reduce) return INVALID_ARGUMENT;
    return begin(stream, source, target, [=] { gather(communicator, (const char*)source, (char*)target, bytes, -1); });
}
int ncclSend(const void*, std::size_t, int, int, void*, void*) { return INVALID_USAGE; }
int ncclRecv(void*, std::size_t, int, int, void*, void*) { return INVALID_USAGE; }
}
