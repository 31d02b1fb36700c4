#include "kernels/wide/argmax.h"

#include "kernels/avx512/lanes.h"
#include "kernels/avx512/operations.h"

namespace kvw::avx512 {

std::size_t argmax(const float* x, std::size_t count) { return wide::argmax<Lanes>(x, count); }

}  // namespace kvw::avx512
