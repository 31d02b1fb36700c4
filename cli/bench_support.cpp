#include "cli/bench_support.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "src/base/random.h"

namespace kvw::cli {

Result<TemporaryFolder> TemporaryFolder::create() {
    std::error_code failed;
    const Path root = std::filesystem::temp_directory_path(failed);
    if (failed) {
        return errno_error("cannot use the folder for temporary files", "TMPDIR", failed.value());
    }
    const Path path = root / fmt::format("kvwitness-bench-{:016x}", entropy64());
    if (const Status made = make_folders(path); !made) {
        return made.error();
    }
    return TemporaryFolder(path);
}

TemporaryFolder::TemporaryFolder(TemporaryFolder&& other) noexcept : path_(std::move(other.path_)) {
    other.path_.clear();
}

TemporaryFolder::~TemporaryFolder() {
    if (!path_.empty()) {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
}

double median(std::vector<double> samples) {
    if (samples.empty()) {
        return 0;
    }
    std::sort(samples.begin(), samples.end());
    const std::size_t middle = samples.size() / 2;
    return samples.size() % 2 == 1 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
}

double mean(const std::vector<double>& samples) {
    const double sum = std::accumulate(samples.begin(), samples.end(), 0.0);
    return samples.empty() ? 0 : sum / static_cast<double>(samples.size());
}

double standard_deviation(const std::vector<double>& samples) {
    if (samples.size() < 2) {
        return 0;
    }
    const double middle = mean(samples);
    double sum = 0;
    for (const double sample : samples) {
        sum += (sample - middle) * (sample - middle);
    }
    return std::sqrt(sum / static_cast<double>(samples.size() - 1));
}

double rounded(double value, int digits) {
    const double scale = std::pow(10.0, digits);
    return std::round(value * scale) / scale;
}

}  // namespace kvw::cli
