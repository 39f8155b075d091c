#!/bin/sh
# install_deps.sh: installs with apt what is missing to build fsdp.c. As root, or with sudo; without
# either it names what is missing and fails, or goes on when nothing is.
set -eu

# oneDNN's CMake package asks for the headers of OpenCL, which libdnnl-dev only recommends.
packages="gcc g++ cmake ninja-build pkg-config libdnnl-dev ocl-icd-opencl-dev libjansson-dev libfyaml-dev libpcre2-dev
libutf8proc-dev libdeflate-dev libxxhash-dev libcmocka-dev"

installed() {
    # "pkg-config" may be provided by pkgconf.
    dpkg-query -W -f '${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed
}

# Without dpkg (not a Debian) what can be asked is whether the tools and libraries answer.
answers() {
    case $1 in
    gcc | g++ | cmake | pkg-config) command -v "$1" >/dev/null ;;
    ninja-build) command -v ninja >/dev/null ;;
    libdnnl-dev) echo '#include <oneapi/dnnl/dnnl.h>' | cc -E - >/dev/null 2>&1 ;;
    ocl-icd-opencl-dev) pkg-config --exists OpenCL ;;
    libjansson-dev) pkg-config --exists jansson ;;
    libfyaml-dev) pkg-config --exists libfyaml ;;
    libpcre2-dev) pkg-config --exists libpcre2-8 ;;
    libutf8proc-dev) pkg-config --exists libutf8proc ;;
    libdeflate-dev) pkg-config --exists libdeflate ;;
    libxxhash-dev) pkg-config --exists libxxhash ;;
    libcmocka-dev) pkg-config --exists cmocka ;;
    esac
}

missing=
for package in $packages; do
    installed "$package" || answers "$package" || missing="$missing $package"
done
if [ -z "$missing" ]; then
    echo "install_deps: nothing is missing"
    exit 0
fi

echo "install_deps: missing:$missing"
if ! command -v apt-get >/dev/null; then
    echo "install_deps: there is no apt-get here; install these packages' counterparts" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    root=
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    root="sudo -n"
elif command -v sudo >/dev/null && [ -t 0 ]; then
    root=sudo
else
    echo "install_deps: neither root nor sudo; as root run: apt-get install$missing" >&2
    exit 1
fi
# A fresh machine has no package lists yet. $root and $missing are lists of words.
# shellcheck disable=SC2086
$root env DEBIAN_FRONTEND=noninteractive sh -c "
    apt-get -q update &&
    apt-get -q install -y --no-install-recommends $missing"
