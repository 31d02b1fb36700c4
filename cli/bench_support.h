// What the benchmarks share: a folder that goes away, and statistics of a few samples.
#pragma once

#include <string>
#include <vector>

#include "src/base/file.h"
#include "src/base/result.h"

namespace kvw::cli {

// A new folder in $TMPDIR, removed with all in it at the end.
class TemporaryFolder {
  public:
    static Result<TemporaryFolder> create();
    TemporaryFolder(TemporaryFolder&& other) noexcept;
    TemporaryFolder& operator=(TemporaryFolder&&) = delete;
    ~TemporaryFolder();
    const Path& path() const { return path_; }

  private:
    explicit TemporaryFolder(Path path) : path_(std::move(path)) {}
    Path path_;
};

double median(std::vector<double> samples);
double mean(const std::vector<double>& samples);
double standard_deviation(const std::vector<double>& samples);  // of the sample (n - 1)
double rounded(double value, int digits);

}  // namespace kvw::cli
