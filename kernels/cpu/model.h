// What other files of the library may know of a model.
#pragma once
#include "octavo.h"
#include "team.h"

namespace octavo {

Team& team_of(OctModel&);

}  // namespace octavo
