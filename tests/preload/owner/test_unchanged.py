"""The hash, and that what it calls unchanged is not copied again."""

from __future__ import annotations

import pytest

MIB = 1 << 20
LEAF = 2 * MIB


def test_the_device_hashes_as_the_cpu_does(program):
    p = program()
    p.do("rng = random.Random(5); data = rng.randbytes(2 * LEAF) + bytes(LEAF)")
    for seed in range(2):
        p.do(f"keys = random_keys({seed})")
        p.do("leaves = [data[i * LEAF : (i + 1) * LEAF] for i in range(3)]")
        p.do("assert device_hash(data, keys) == [cpu_hash(leaf, keys) for leaf in leaves]")


def test_any_flipped_bit_and_any_other_key_changes_the_hash(program):
    p = program()
    p.do(
        "rng = random.Random(6); data = bytearray(rng.randbytes(LEAF)); keys = random_keys(1)\n"
        "seen = {cpu_hash(bytes(data), keys), cpu_hash(bytes(data), random_keys(2))}\n"
        "places = [0, 8 * LEAF - 1] + [rng.randrange(8 * LEAF) for _ in range(60)]\n"
        "for bit in places:\n"
        "    data[bit // 8] ^= 1 << bit % 8\n"
        "    seen.add(cpu_hash(bytes(data), keys))\n"
        "    data[bit // 8] ^= 1 << bit % 8\n"
    )
    assert p.get("len(seen)") == 2 + p.get("len(set(places))")
    assert p.get("max(max(d) for d in seen) < 2**61 - 1")
    assert len(set(p.get("[h[0] for h in seen]"))) == len(set(p.get("[h[1] for h in seen]")))


def test_swapped_rows_columns_and_words_change_the_hash(program):
    """Sums alone would not see these."""
    p = program()
    p.do(
        "base = random.Random(7).randbytes(LEAF); keys = random_keys(3)\n"
        "def exchanged(a, b, size):\n"
        "    d = bytearray(base)\n"
        "    d[a:a + size], d[b:b + size] = base[b:b + size], base[a:a + size]\n"
        "    return cpu_hash(bytes(d), keys)\n"
        "seen = {cpu_hash(base, keys), exchanged(0, 4096, 4096), exchanged(0, 16, 16),\n"
        "        exchanged(0, 4, 4),"
        "        exchanged(0, 8, 8), exchanged(16, LEAF - 16, 16), exchanged(4096, 8192, 16)}"
    )
    assert p.get("len(seen)") == 7


@pytest.fixture
def hashing(program):
    """A program of which all was out and in once."""
    p = program(KIWI_VERIFY="1")
    p.do(
        "prepare(); held = [make(size, size) for size in (100, 8 * MIB, 20 * MIB)]; until_hashing()"
    )
    p.do("swap(); same(*held)")
    assert p.get("books()['kept']") == p.get("books()['owned']")
    return p


def copied_by(p, code):
    before = p.get("moved()")
    p.do(code)
    after = p.get("moved()")
    return {name: after[name] - before[name] for name in before}


def test_what_did_not_change_is_not_copied_again(hashing):
    owned = hashing.get("books()['owned']")
    for _ in range(2):
        got = copied_by(hashing, "swap(); same(*held)")
        assert (got["copied"], got["skipped"], got["verified"]) == (0, owned, owned // LEAF)
        assert (got["differed"], got["unused"]) == (0, 0)


def test_of_what_changed_only_the_leaf_is_copied(hashing):
    owned = hashing.get("books()['owned']")
    hashing.do("write(held[2], 1, 7 * MIB, 1)")
    got = copied_by(hashing, "swap(); same(*held)")
    assert (got["copied"], got["skipped"]) == (LEAF, owned - LEAF)
    hashing.do("write(held[1], 2, 0, 1); write(held[1], 3, 8 * MIB - 1, 1); write(held[0], 4)")
    assert copied_by(hashing, "swap(); same(*held)")["copied"] == 3 * LEAF


def test_a_change_that_the_hash_misses_is_found_by_comparing(hashing):
    hashing.do("write(held[2], 1, 7 * MIB, 1); fault('hash')")
    got = copied_by(hashing, "swap(); same(*held)")
    assert (got["copied"], got["differed"]) == (LEAF, 1)


def test_new_memory_is_copied_and_then_kept_too(hashing):
    hashing.do("held.append(make(5 * MIB, 9))")
    assert copied_by(hashing, "swap(); same(*held)")["copied"] == 6 * MIB
    assert copied_by(hashing, "swap(); same(*held)")["copied"] == 0


def test_kept_copies_end_with_their_memory_or_when_they_are_to_be_forgotten(hashing):
    hashing.do("drop(held.pop()); check()")
    assert hashing.get("books()['kept']") == hashing.get("books()['owned']") == 10 * MIB
    hashing.do("library.kiwi_preload_test_forget(); check()")
    assert hashing.get("books()['kept']") == hashing.get("arena()['used']") == 0
    assert copied_by(hashing, "swap(); same(*held)")["copied"] == 10 * MIB


def test_keeping_can_be_switched_off(program):
    p = program(KIWI_PRELOAD_KEEP="0")
    p.do("prepare(); a = make(5 * MIB, 1)")
    p.do("until(lambda: arena()['pinned'], 'nothing was pinned'); swap(); swap(); same(a)")
    assert p.get("books()['kept']") == 0
    assert p.get("moved()['copied']") == 12 * MIB


# ---- cleaning in the background ------------------------------------------------------------


@pytest.fixture
def idle(program):
    """A program whose memory was never out."""
    p = program(KIWI_VERIFY="1")
    p.do("prepare(); held = [make(size, size) for size in (100, 8 * MIB, 20 * MIB)]")
    p.do("until_hashing()")
    return p


def test_what_was_cleaned_while_idle_is_not_copied_on_the_way_out(idle):
    owned = idle.get("books()['owned']")
    assert idle.get("clean()") == owned
    assert idle.get("clean()") == 0
    assert idle.get("books()['kept']") == owned
    idle.do("same(*held); check()")
    got = copied_by(idle, "swap(); same(*held)")
    assert (got["copied"], got["skipped"]) == (0, owned)


def test_cleaning_goes_on_where_it_stopped(idle):
    owned = idle.get("books()['owned']")
    slices, more = [], True
    while more:
        got, more = idle.get("clean_slice(3 * MIB)")
        assert got <= 4 * MIB
        slices.append(got)
        assert len(slices) <= owned // LEAF
        idle.do("check()")
    assert sum(slices) == owned
    assert copied_by(idle, "swap(); same(*held)")["copied"] == 0


def test_only_what_changed_since_is_cleaned_again(idle):
    idle.do("clean(); write(held[2], 1, 7 * MIB, 1)")
    assert copied_by(idle, "clean()")["copied"] == LEAF
    assert copied_by(idle, "write(held[0], 4); swap(); same(*held)")["copied"] == LEAF


def test_cleaning_that_fails_changes_nothing(idle):
    idle.do("fault('copy_out', 3)")
    assert idle.get("clean()") == -1
    idle.do("same(*held); check()")
    idle.do("library.kiwi_preload_test_forget(); write(held[1], 9)")
    idle.do("library.kiwi_preload_test_arena(1, ctypes.c_uint64(10 * MIB))")
    assert idle.get("clean()") == -1  # the limit of host memory
    idle.do("same(*held); check(); prepare(); clean(); swap(); same(*held); check()")
