// Names of back ends and what each means: which path takes what is cached, which what is not.
#pragma once

#include <memory>

#include "common.hpp"
#include "file.hpp"
#include "readers/reader.hpp"

namespace tl {

const char *backend_name(int backend);
const char *path_name(int path);

// Null where the back end is part of this build, else why not.
const char *backend_not_built(uint32_t backend);

// The reader of a deep path; one that was not built answers so when it is started.
std::unique_ptr<DeepReader> make_deep_reader(RequestSink *sink, int path, const DeepLimits &limits);

// Decides how an open file is read for the device of the options, trying their back ends from file->candidate on; refusals
// are noted in the file. The file's mutex is held. Fails with TL_ERR_BACKEND and every reason when none is left.
Failure choose_route(File *file, const tl_options &options);

// A path that the route of a file uses turned out to be refused, for the given reason: takes it out of the route, or moves
// on to the next back end. The file's mutex is held.
Failure drop_path(File *file, int path, const std::string &why, const tl_options &options);

}  // namespace tl
