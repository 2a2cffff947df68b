#!/bin/sh
# Installs the Debian/Ubuntu packages named as arguments that are missing: by apt as root or through sudo, else one
# line says which to ask for. Without fuse3's the data view falls back to plain files, so that is only a warning.
missing=""
for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
if ! command -v apt-get >/dev/null; then
    echo "no apt-get here; if something fails below, install what these Debian packages hold:$missing" >&2
    exit 0
fi
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    echo "cannot install packages here; ask for: apt-get install$missing" >&2
    exit 0
fi
echo "installing$missing" >&2
$as_root env DEBIAN_FRONTEND=noninteractive sh -c "apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing" >/dev/null
