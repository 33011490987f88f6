#!/bin/sh
# The README's lines in a system that has QEMU and limosa: a Linux guest that counts is saved, and brought back in each
# way. Fails unless every guest goes on counting where the saved one was.
set -eu
cd "$(mktemp -d)"

# The VM, with more options.
qemu() {
    exec qemu-system-x86_64 -machine q35 -accel tcg -cpu max -m 256M -display none -nodefaults \
        -kernel /guest/kernel -initrd /guest/initrd -append "$(cat /guest/words)" "$@"
}

# The number of the last line "count N" of a serial port's file, or 0.
count() {
    sed -n 's/^count \([0-9]*\)\r*$/\1/p' "$1" 2>/dev/null | tail -n 1 | grep . || echo 0
}

# Waits until a guest has counted to a number.
wait_count() {
    tries=0
    until [ "$(count "$1")" -ge "$2" ]; do
        tries=$((tries + 1))
        if [ "$tries" -gt 1200 ]; then echo "$1: the guest does not count to $2"; tail -n 5 "$1"; exit 1; fi
        sleep 0.1
    done
}

# Expects that a guest that was brought back counts on from the saved one, and ends it.
goes_on() {
    wait_count "$2" $((before + 5))
    first=$(sed -n 's/^count \([0-9]*\)\r*$/\1/p' "$2" | head -n 1)
    if [ "$first" -lt "$before" ] || [ "$first" -gt $((after + 1)) ]; then
        echo "$1: it counts from $first, and was saved between $before and $after"
        exit 1
    fi
    echo "$1: goes on at $first"
}

(qemu -serial file:saved -qmp unix:vm.qmp,server=on,wait=off) &
vm=$!
wait_count saved 5
before=$(count saved)
limosa save --qmp vm.qmp vm.limosa
after=$(count saved)
wait_count saved $((after + 2))
kill "$vm"
wait "$vm" || true

(exec limosa run vm.limosa -- qemu-system-x86_64 -machine q35 -accel tcg -cpu max -m 256M -display none -nodefaults \
    -kernel /guest/kernel -initrd /guest/initrd -append "$(cat /guest/words)" \
    -serial file:run -qmp unix:run.qmp,server=on,wait=off) &
vm=$!
goes_on run run
kill "$vm"
wait "$vm" || true

limosa clone vm.limosa --count 2 --dir clones -- qemu-system-x86_64 -machine q35 -accel tcg -cpu max -m 256M \
    -display none -nodefaults -kernel /guest/kernel -initrd /guest/initrd -append "$(cat /guest/words)" \
    -serial 'file:{dir}/serial'
goes_on "clone 1" clones/001/serial
goes_on "clone 2" clones/002/serial
limosa clone stop clones
limosa clone rm clones

(qemu -serial file:restored -incoming defer -qmp unix:restored.qmp,server=on,wait=off) &
vm=$!
tries=0
until [ -S restored.qmp ]; do tries=$((tries + 1)); [ "$tries" -lt 100 ] || exit 1; sleep 0.1; done
limosa restore vm.limosa --qmp restored.qmp
goes_on restore restored
kill "$vm"
wait "$vm" || true
limosa inspect vm.limosa >/dev/null
echo "all of it works with $(qemu-system-x86_64 --version | head -n 1)"
