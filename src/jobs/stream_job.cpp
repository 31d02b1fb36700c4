#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>

#include "src/jobs/requests.h"

namespace kvw {

namespace {

// Lines that were read and wait for room: enough that cancel lines behind them are seen. Beyond
// that the writer of the input waits.
constexpr std::size_t kHeldLinesMax = 1024;
constexpr std::size_t kHeldBytesMax = 64 << 20;
constexpr std::size_t kReadAheadMax = 1 << 20;  // while the reader of the answers is slow
constexpr std::size_t kPipeBytes = 4096;        // what a pipe that is ready takes without waiting
constexpr int kWaitMs = 200;  // how soon a signal that came just before a wait is seen

struct Held {
    JobLine line;
    std::size_t bytes = 0;
    bool cancelled = false;
};

class StreamJob {
  public:
    StreamJob(const JobContext& context, const JobOptions& options, int input, int output)
        : context_(context),
          input_(input),
          output_(output),
          reader_(input),
          parser_(options, context.tokenizer, context.chat, true),
          requests_(context, report_,
                    [this](std::uint64_t, std::string_view bytes, bool) { return write(bytes); }) {}

    JobReport run() {
        if (const Status ended = work(); !ended) {
            report_.error = ended.error();
        }
        report_.reader_gone = reader_gone_;
        return std::move(report_);
    }

  private:
    Status work() {
        for (;;) {
            look_around();
            if (!ending_) {
                if (const Status read = read_lines(); !read) {
                    return read;
                }
            }
            if (const Status submitted = submit_held(); !submitted) {
                return submitted;
            }
            if (requests_.empty() && held_.empty()) {
                if (ending_ || reader_.at_end()) {
                    return {};
                }
                // Ends are recorded and pages scrubbed before the wait for the next line.
                if (context_.engine.idle()) {
                    wait(kWaitMs, false);
                    continue;
                }
            }
            if (const Status stepped = requests_.step(); !stepped || report_.engine_stopped) {
                return stepped;
            }
        }
    }

    // A signal, or a reader that left: what runs is cancelled, what waits ends with it.
    void look_around() {
        wait(0, false);
        if (ending_ || (!reader_gone_ && !(context_.stop && context_.stop()))) {
            return;
        }
        ending_ = true;
        report_.stopped = !reader_gone_;
        requests_.cancel_all();
        for (Held& held : held_) {
            held.cancelled = true;
        }
    }

    // Sees whether there is input, and whether answers are still wanted (and, for `writing`,
    // whether some of them can be taken).
    void wait(int timeout_ms, bool writing) {
        const bool reads =
            !reader_.at_end() && !ending_ && (!writing || reader_.buffered() < kReadAheadMax);
        std::array<pollfd, 2> files = {
            {{.fd = reads ? input_ : -1, .events = POLLIN, .revents = 0},
             {.fd = output_, .events = static_cast<short>(writing ? POLLOUT : 0), .revents = 0}}};
        input_ready_ = output_ready_ = false;
        if (::poll(files.data(), files.size(), timeout_ms) < 0) {
            return;  // a signal
        }
        input_ready_ = files[0].revents != 0;
        output_ready_ = (files[1].revents & POLLOUT) != 0;
        reader_gone_ |= (files[1].revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
    }

    Status read_lines() {
        for (;;) {
            while (held_.size() < kHeldLinesMax && held_bytes_ < kHeldBytesMax) {
                const std::optional<RawLine> line = reader_.take();
                if (!line) {
                    break;
                }
                if (const Status accepted = accept(*line); !accepted) {
                    return accepted;
                }
            }
            if (held_.size() >= kHeldLinesMax || held_bytes_ >= kHeldBytesMax || reader_.at_end()) {
                return {};
            }
            wait(0, false);
            if (!input_ready_ || reader_gone_) {
                return {};
            }
            if (const Result<bool> more = reader_.fill(); !more) {
                return more.error();
            }
        }
    }

    Status accept(const RawLine& raw) {
        JobLine line = parser_.parse(raw);
        if (line.cancels) {
            // Whoever has ended already needs no second end.
            const auto waiting = std::find_if(held_.begin(), held_.end(), [&](const Held& held) {
                return held.line.custom_id == *line.cancels;
            });
            if (waiting != held_.end()) {
                waiting->cancelled = true;
            } else {
                requests_.cancel(*line.cancels);
            }
            return {};
        }
        if (line.error) {
            return requests_.submit(std::move(line));
        }
        const std::size_t bytes = raw.bytes.size() + line.request.prompt_ids.size() * 4;
        held_bytes_ += bytes;
        held_.push_back({.line = std::move(line), .bytes = bytes});
        return {};
    }

    // Cancelled lines first: they only have to end. Then the tenant with the fewest requests in
    // the engine, so that whoever sends many lines at once does not keep others out.
    Status submit_held() {
        while (!held_.empty() && !reader_gone_) {
            auto next = std::find_if(held_.begin(), held_.end(),
                                     [](const Held& held) { return held.cancelled; });
            if (next == held_.end() && !requests_.room()) {
                return {};
            }
            if (next == held_.end()) {
                next =
                    std::min_element(held_.begin(), held_.end(), [&](const Held& a, const Held& b) {
                        return requests_.count_of(a.line.tenant) <
                               requests_.count_of(b.line.tenant);
                    });
            } else if (context_.engine.waiting() >= context_.engine.config().queue_max) {
                return {};
            }
            Held held = std::move(*next);
            held_.erase(next);
            held_bytes_ -= held.bytes;
            const std::string custom_id = *held.line.custom_id;
            if (const Status submitted = requests_.submit(std::move(held.line)); !submitted) {
                return submitted;
            }
            if (held.cancelled) {
                requests_.cancel(custom_id);
            }
        }
        if (reader_gone_) {
            held_.clear();  // nobody is there to hear of their end
        }
        return {};
    }

    // All of it or nothing: of a line that was cut short the caller can use no byte. While the
    // reader is slow, input is read ahead, so that a parent that writes before it reads is not
    // waited for.
    Result<bool> write(std::string_view bytes) {
        while (!bytes.empty() && !reader_gone_) {
            wait(kWaitMs, true);
            if (input_ready_) {
                if (const Result<bool> more = reader_.fill(); !more) {
                    return more.error();
                }
            }
            if (!output_ready_) {
                continue;
            }
            const ssize_t put = ::write(output_, bytes.data(), std::min(bytes.size(), kPipeBytes));
            if (put < 0 && (errno == EPIPE || errno == EBADF)) {
                reader_gone_ = true;
            } else if (put < 0 && errno != EINTR && errno != EAGAIN) {
                return errno_error("cannot write to", "the output", errno);
            } else if (put > 0) {
                bytes.remove_prefix(static_cast<std::size_t>(put));
            }
        }
        return !reader_gone_;
    }

    const JobContext& context_;
    int input_, output_;
    JobReport report_;
    LineReader reader_;
    LineParser parser_;
    Requests requests_;
    std::deque<Held> held_;
    std::size_t held_bytes_ = 0;
    bool ending_ = false, reader_gone_ = false, input_ready_ = false, output_ready_ = false;
};

}  // namespace

JobReport run_stream(const JobContext& context, const JobOptions& options, int input, int output) {
    return StreamJob(context, options, input, output).run();
}

}  // namespace kvw
