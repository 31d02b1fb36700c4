// What kernel tests share: the variants this machine has, and samples that any machine draws alike.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "src/base/random.h"

namespace kvw::test {

inline std::vector<const Kernels*> wide_variants() {
    std::vector<const Kernels*> found;
    for (const Isa isa : {Isa::avx2, Isa::avx512}) {
        if (const Kernels* kernels = kernels_for(isa)) {
            found.push_back(kernels);
        }
    }
    return found;
}

inline std::vector<const Kernels*> all_variants() {
    std::vector<const Kernels*> found = wide_variants();
    found.push_back(kernels_for(Isa::ref));
    return found;
}

// Uniform in [-range, range); `seed` names the sample.
inline std::vector<float> sample(std::size_t count, std::uint32_t seed, float range = 1.0f) {
    std::vector<float> x(count);
    for (std::size_t i = 0; i < count; i += 4) {
        const auto draw = philox4x32({static_cast<std::uint32_t>(i), 0, 0, 0}, {seed, 0});
        for (std::size_t j = i; j < i + 4 && j < count; ++j) {
            x[j] = (static_cast<float>(draw[j - i] >> 8) * 0x1p-23f - 1.0f) * range;
        }
    }
    return x;
}

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace kvw::test
