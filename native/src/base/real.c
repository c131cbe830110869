/* The driver's own functions, for all rooms; driver.c finds them. */
#include "base/real.h"

struct kp_real kp_real;
