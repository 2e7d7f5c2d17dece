#!/bin/sh
# Is there a Chromium, which the tests of reports and of `sparkdl ui` look at pages with?
#
# Prints its path. Where there is none, and apt-get may be used, it is installed first. Otherwise
# says in one sentence on stderr what is missing, and exits 1; those tests are then skipped.
set -u

find_chromium() {
    for candidate in "${CHROMIUM:-}" chromium chromium-browser google-chrome; do
        if [ -n "$candidate" ] && command -v "$candidate"; then
            return 0
        fi
    done
    return 1
}

find_chromium && exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    {
        apt-get update -qq &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium
    } >/dev/null 2>&1
    find_chromium && exit 0
fi
echo "there is no Chromium, so the tests that look at pages are skipped; install one, for example with 'apt-get install chromium', or name it with CHROMIUM=/path/to/chromium." >&2
exit 1
