// kvwitness: the command line.
#include "cli/commands.h"
#include "cli/signals.h"

int main(int argc, char** argv) {
    using namespace kvw::cli;
    guard_standard_files();
    install_signal_handlers();
    Session session;
    Commands commands(session);
    add_run(commands);
    add_batch(commands);
    add_verify(commands);
    add_replay(commands);
    commands.group("trace", "list, describe, print and remove traces");
    add_trace_ls(commands);
    add_trace_show(commands);
    add_trace_dump(commands);
    add_trace_remove(commands);
    commands.group("model", "describe and check model files, and tokenize text");
    add_model_info(commands);
    add_model_tokenize(commands);
    add_bench(commands);
    add_bench_verify(commands);
    add_bench_limits(commands);
    commands.group("config", "show what is set and by whom, and check a configuration file");
    add_config(commands);
    add_completion(commands);
    add_help(commands);
    return commands.run(argc, argv);
}
