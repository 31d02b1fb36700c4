#include "kernels/wide/argmax.h"

#include "kernels/avx2/lanes.h"
#include "kernels/avx2/operations.h"

namespace kvw::avx2 {

std::size_t argmax(const float* x, std::size_t count) { return wide::argmax<Lanes>(x, count); }

}  // namespace kvw::avx2
