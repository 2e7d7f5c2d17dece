#!/bin/sh
# How do Python packages come to executors that lack them? As an archive for spark-submit:
#   conf/clusters/pack.sh sparkdl-packages.tar.gz --constraint requirements.lock '.[torch]' pandas
#   spark-submit --archives sparkdl-packages.tar.gz#packages ...
# The first argument is the file to write, the others are pip's. PYSPARK_PYTHON (or python3) must
# be of the executors' Python version, operating system and processor type.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: pack.sh FILE.tar.gz PACKAGE..." >&2
    exit 2
fi
archive=$1
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYSPARK_PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check \
    --target "$folder" "$@"
tar --create --gzip --file "$archive" --directory "$folder" .
