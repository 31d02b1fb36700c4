// A loop whose body the compiler sees once per index: vectors kept in arrays then live in
// registers.
#pragma once

#include <type_traits>
#include <utility>

namespace kvw {

// f(std::integral_constant<int, 0>) ... f(std::integral_constant<int, count - 1>), in order. Always
// inlined, so that no copy made for one instruction set is linked into code for another.
template <int count, class F>
[[gnu::always_inline]] inline void unrolled(F&& f) {
    [&]<int... index>(std::integer_sequence<int, index...>) __attribute__((always_inline)) {
        (f(std::integral_constant<int, index>{}), ...);
    }
    (std::make_integer_sequence<int, count>{});
}

}  // namespace kvw
