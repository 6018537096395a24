#!/bin/sh
# redis-server is installed where that can be done, and no service of it runs: tests start their own.
# Without it the tests of several daemons, and those of Redis as a remote tier, are skipped, so this never fails.
command -v redis-server >/dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "no redis-server: the tests that need it will be skipped (apt-get install redis-server)"
  exit 0
fi
echo "installing redis-server, for the tests of several daemons and of the remote tier"
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get install -y -qq redis-server >/dev/null 2>&1 ||
  { apt-get update -qq && apt-get install -y -qq redis-server; } >/dev/null 2>&1 ||
  echo "redis-server could not be installed: the tests that need it will be skipped"
if command -v systemctl >/dev/null; then
  systemctl disable redis-server >/dev/null 2>&1
fi
exit 0
