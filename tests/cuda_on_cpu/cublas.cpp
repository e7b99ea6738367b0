// As much of cuBLAS as products of matrices and vectors need: column by column, as it has them.
#include "work.hpp"

#include <complex>
#include <cstdint>
#include <type_traits>

using namespace standin;

namespace {
struct Handle {
    void* stream = nullptr;
    int pointer_mode = 0, math_mode = 0;
};

template <class T>
T conjugate(T x) {
    return x;
}
template <class T>
std::complex<T> conjugate(std::complex<T> x) {
    return std::conj(x);
}

template <class T>
T at(const T* matrix, int leading, int operation, int row, int column) {
    if (operation == 0) return matrix[row + (std::int64_t)column * leading];
    const T value = matrix[column + (std::int64_t)row * leading];
    return operation == 2 ? conjugate(value) : value;
}

template <class T>
void multiply(int op_a, int op_b, int m, int n, int k, T alpha, const T* a, int lda, const T* b, int ldb, T beta, T* c,
              int ldc) {
    for (int column = 0; column < n; ++column)
        for (int row = 0; row < m; ++row) {
            T sum = 0;
            for (int i = 0; i < k; ++i) sum += at(a, lda, op_a, row, i) * at(b, ldb, op_b, i, column);
            T& target = c[row + (std::int64_t)column * ldc];
            target = alpha * sum + (beta == T(0) ? T(0) : beta * target);
        }
}

// A factor is in host memory or, by the pointer mode, on the device, and then read when its turn has come.
template <class T>
std::function<T()> factor(const Handle* handle, const T* address) {
    if (handle->pointer_mode == 1) return [=] { return *address; };
    const T value = *address;
    return [=] { return value; };
}

template <class T>
int gemm(void* given, int op_a, int op_b, int m, int n, int k, const T* alpha, const T* a, int lda, std::int64_t step_a,
         const T* b, int ldb, std::int64_t step_b, const T* beta, T* c, int ldc, std::int64_t step_c, int count) {
    const auto* handle = (Handle*)given;
    const auto first = factor(handle, alpha), second = factor(handle, beta);
    put(stream_of(handle->stream), [=] {
        for (int i = 0; i < count; ++i)
            multiply(op_a, op_b, m, n, k, first(), a + i * step_a, lda, b + i * step_b, ldb, second(), c + i * step_c,
                     ldc);
    });
    return 0;
}

template <class T>
int dot(void* given, int n, const T* x, int step_x, const T* y, int step_y, T* result, bool conjugates) {
    const auto* handle = (Handle*)given;
    const auto task = put(stream_of(handle->stream), [=] {
        T sum = 0;
        for (std::int64_t i = 0; i < n; ++i)
            sum += (conjugates ? conjugate(x[i * step_x]) : x[i * step_x]) * y[i * step_y];
        *result = sum;
    });
    if (handle->pointer_mode == 0) wait_for(task);
    return 0;
}

typedef std::complex<float> C;
typedef std::complex<double> Z;
const int NOT_SUPPORTED = 15, REAL_32 = 0, REAL_64 = 1, COMPLEX_32 = 4, COMPLEX_64 = 5;

template <class T>
int gemm_ex(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int lda,
            std::int64_t step_a, const void* b, int ldb, std::int64_t step_b, const void* beta, void* c, int ldc,
            std::int64_t step_c, int count) {
    return gemm<T>(handle, op_a, op_b, m, n, k, (const T*)alpha, (const T*)a, lda, step_a, (const T*)b, ldb, step_b,
                   (const T*)beta, (T*)c, ldc, step_c, count);
}
}  // namespace

#define OF_TYPE(LETTER, T)                                                                                           \
    int cublas##LETTER##gemm_v2(void* h, int ta, int tb, int m, int n, int k, const T* alpha, const T* a, int lda,   \
                                const T* b, int ldb, const T* beta, T* c, int ldc) {                                 \
        return gemm<T>(h, ta, tb, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1);                         \
    }                                                                                                                \
    int cublas##LETTER##gemmStridedBatched(void* h, int ta, int tb, int m, int n, int k, const T* alpha, const T* a, \
                                           int lda, long long sa, const T* b, int ldb, long long sb, const T* beta,  \
                                           T* c, int ldc, long long sc, int count) {                                 \
        return gemm<T>(h, ta, tb, m, n, k, alpha, a, lda, sa, b, ldb, sb, beta, c, ldc, sc, count);                  \
    }                                                                                                                \
    int cublas##LETTER##gemv_v2(void* h, int ta, int m, int n, const T* alpha, const T* a, int lda, const T* x,      \
                                int step_x, const T* beta, T* y, int step_y) {                                       \
        const int rows = ta ? n : m, length = ta ? m : n; /* x as a row, which is what a leading dimension walks */  \
        const auto* handle = (Handle*)h;                                                                             \
        const auto first = factor(handle, alpha), second = factor(handle, beta);                                     \
        put(stream_of(handle->stream), [=] {                                                                         \
            for (int row = 0; row < rows; ++row) {                                                                   \
                T sum = 0;                                                                                           \
                for (std::int64_t i = 0; i < length; ++i) sum += at(a, lda, ta, row, (int)i) * x[i * step_x];        \
                T& target = y[(std::int64_t)row * step_y];                                                           \
                target = first() * sum + (second() == T(0) ? T(0) : second() * target);                              \
            }                                                                                                        \
        });                                                                                                          \
        return 0;                                                                                                    \
    }

extern "C" {
int cublasCreate_v2(void** handle) { return *handle = new Handle, 0; }
int cublasDestroy_v2(void* handle) { return delete (Handle*)handle, 0; }
int cublasGetVersion_v2(void*, int* version) { return *version = 130000, 0; }
int cublasSetStream_v2(void* handle, void* stream) { return ((Handle*)handle)->stream = stream, 0; }
int cublasGetStream_v2(void* handle, void** stream) { return *stream = ((Handle*)handle)->stream, 0; }
int cublasSetPointerMode_v2(void* handle, int mode) { return ((Handle*)handle)->pointer_mode = mode, 0; }
int cublasGetPointerMode_v2(void* handle, int* mode) { return *mode = ((Handle*)handle)->pointer_mode, 0; }
int cublasSetMathMode(void* handle, int mode) { return ((Handle*)handle)->math_mode = mode, 0; }
int cublasGetMathMode(void* handle, int* mode) { return *mode = ((Handle*)handle)->math_mode, 0; }
OF_TYPE(S, float)
OF_TYPE(D, double)
OF_TYPE(C, C)
OF_TYPE(Z, Z)
int cublasSdot_v2(void* h, int n, const float* x, int sx, const float* y, int sy, float* r) {
    return dot(h, n, x, sx, y, sy, r, false);
}
int cublasDdot_v2(void* h, int n, const double* x, int sx, const double* y, int sy, double* r) {
    return dot(h, n, x, sx, y, sy, r, false);
}
int cublasCdotu_v2(void* h, int n, const C* x, int sx, const C* y, int sy, C* r) {
    return dot(h, n, x, sx, y, sy, r, false);
}
int cublasCdotc_v2(void* h, int n, const C* x, int sx, const C* y, int sy, C* r) {
    return dot(h, n, x, sx, y, sy, r, true);
}
int cublasZdotu_v2(void* h, int n, const Z* x, int sx, const Z* y, int sy, Z* r) {
    return dot(h, n, x, sx, y, sy, r, false);
}
int cublasZdotc_v2(void* h, int n, const Z* x, int sx, const Z* y, int sy, Z* r) {
    return dot(h, n, x, sx, y, sy, r, true);
}
int cublasGemmStridedBatchedEx(void* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a,
                               int type_a, int lda, long long sa, const void* b, int type_b, int ldb, long long sb,
                               const void* beta, void* c, int type_c, int ldc, long long sc, int count, int, int) {
    if (type_a != type_b || type_b != type_c) return NOT_SUPPORTED;
    switch (type_a) {
        case REAL_32:
            return gemm_ex<float>(h, ta, tb, m, n, k, alpha, a, lda, sa, b, ldb, sb, beta, c, ldc, sc, count);
        case REAL_64:
            return gemm_ex<double>(h, ta, tb, m, n, k, alpha, a, lda, sa, b, ldb, sb, beta, c, ldc, sc, count);
        case COMPLEX_32:
            return gemm_ex<C>(h, ta, tb, m, n, k, alpha, a, lda, sa, b, ldb, sb, beta, c, ldc, sc, count);
        case COMPLEX_64:
            return gemm_ex<Z>(h, ta, tb, m, n, k, alpha, a, lda, sa, b, ldb, sb, beta, c, ldc, sc, count);
        default:
            return NOT_SUPPORTED;
    }
}
int cublasGemmEx(void* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int type_a, int lda,
                 const void* b, int type_b, int ldb, const void* beta, void* c, int type_c, int ldc, int compute,
                 int how) {
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c, type_c,
                                      ldc, 0, 1, compute, how);
}
}
