#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "tests/kernels/every_isa.h"

using namespace kvw;
using namespace kvw::test;

TEST_CASE("a table is found by its name, and auto is the best there is") {
    for (const Kernels* kernels : all_variants()) {
        CHECK(kernels_named(kernels->isa) == kernels);
    }
    REQUIRE(kernels_for(Isa::ref) != nullptr);
    CHECK(kernels_named("auto") == &best_kernels());
    CHECK(kernels_named("avx9") == nullptr);
    CHECK(kernels_named("") == nullptr);
    const Kernels* avx512 = kernels_for(Isa::avx512);
    CHECK((avx512 == nullptr || &best_kernels() == avx512));
}

TEST_CASE("a report keeps the first fault in the order of layer, head and table entry") {
    SequenceReport report;
    report.report({.layer = 2, .head = 0, .table_index = 0});
    report.report({.layer = 1, .head = 1, .table_index = 5});
    report.report({.layer = 1, .head = 1, .table_index = 3});
    report.report({.layer = 1, .head = 2, .table_index = 0});
    CHECK(report.faults == 4);
    REQUIRE(report.first_faults.size() == 1);
    CHECK(report.first_faults[0].layer == 1);
    CHECK(report.first_faults[0].head == 1);
    CHECK(report.first_faults[0].table_index == 3);
    report.clear();
    CHECK(report.faults == 0);
    CHECK(report.first_faults.empty());
}
