// The part of zero._cpu that moves files, see aio.h.
#pragma once

#include <pybind11/pybind11.h>

namespace zero {

void bind_aio(pybind11::module_& m);

}  // namespace zero
