/* A libacl_op_compiler that takes options and compiles nothing. */
#include <string.h>

int aclSetCompileopt(int option, const char *value) { return 0; }
unsigned long aclGetCompileoptSize(int option) { return 16; }
int aclGetCompileopt(int option, char *value, unsigned long length) {
  strncpy(value, "disable", length);
  return 0;
}
