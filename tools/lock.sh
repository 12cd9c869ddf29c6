#!/bin/sh
# Write the locks: requirements/NAME.txt for every requirements/NAME.in that is installed by itself, with the hashes of all files.
#   tools/lock.sh UV [ARGUMENT...]
# UV is the program.  Versions that a lock names stay while they are allowed; arguments (--upgrade, --upgrade-package NAME)
# are for uv, and let them move.
#
# uv is used because it resolves for all Pythons at once, writes the hashes of all files, and reads no configuration of pip:
# the locks are the same on machines that have a CPU build of torch and on those that have none.
set -eu
uv=$1
shift
cd "$(dirname "$0")/.."
folder=requirements
CUDA='^(cuda|nvidia)-'

# compile INPUT OUTPUT ARGUMENT...: for Python 3.10 and newer, or what the input says.
compile() {
    input=$1
    output=$2
    shift 2
    oldest=$(sed -n 's/^# Needs Python //p' "$input")
    "$uv" pip compile --quiet --universal --python-version "${oldest:-3.10}" --generate-hashes --custom-compile-command "make lock" \
        "$@" --output-file "$output" "$input"
}

names() { sed -nE 's/^([a-z0-9-]+)==.*/\1/p' "$1" | sort -u; }

# part NAMES OUTPUT: what is in $all, but for some packages.
part() {
    cp "$all" "$2"
    # shellcheck disable=SC2046  # one argument per package
    compile "$input" "$2" --offline $(echo "$1" | sed 's/^/--no-emit-package=/')
}

for name in pip uv docs; do
    echo "$folder/$name.txt"
    compile "$folder/$name.in" "$folder/$name.txt" "$@"
done

# The libraries of a CUDA build have a lock of their own: a CPU build needs none of them.
all=$(mktemp)
trap 'rm -f "$all"' EXIT
for input in "$folder"/torch*.in; do
    lock=${input%.in}
    echo "$lock.txt and $lock-cuda.txt"
    cat "$lock.txt" "$lock-cuda.txt" 2>/dev/null >"$all" || true
    compile "$input" "$all" "$@"
    part "$(names "$all" | grep -vE "$CUDA")" "$lock-cuda.txt"
    part "$(names "$all" | grep -E "$CUDA")" "$lock.txt"
done

# What other versions of transformers need, beside the torch of the tests.
for input in "$folder"/transformers*.in; do
    echo "${input%.in}.txt"
    compile "$input" "${input%.in}.txt" "$@"
done

# Programs of other packages: what their models import, and nothing else that they ask for.
echo "$folder/programs.txt"
compile "$folder/programs.in" "$folder/programs.txt" --no-deps "$@"
