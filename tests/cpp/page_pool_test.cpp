// Pages with reference counts.
#include "cpp/memory/page_pool.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "tests/cpp/errors.h"

namespace imp {

TEST_CASE("the lowest pages come first and come back") {
  PagePool pool(5);
  std::vector<std::int32_t> pages{99};
  REQUIRE(pool.take(3, pages));
  CHECK(pages == std::vector<std::int32_t>{99, 0, 1, 2});
  CHECK(pool.free() == 2);
  pool.release(1);
  CHECK(pool.free() == 3);
  std::vector<std::int32_t> again;
  REQUIRE(pool.take(1, again));
  CHECK(again == std::vector<std::int32_t>{1});
}

TEST_CASE("all or none, with both numbers") {
  PagePool pool(4);
  std::vector<std::int32_t> pages;
  REQUIRE(pool.take(2, pages));
  const auto r = pool.take(3, pages);
  REQUIRE_FALSE(r);
  CHECK(r.error().needed == 3);
  CHECK(r.error().available == 2);
  CHECK(r.error().message() == "cache pages: 3 needed, 2 available");
  CHECK(pages.size() == 2);
  CHECK(pool.free() == 2);
  REQUIRE(pool.take(2, pages));
  CHECK_FALSE(pool.take(1, pages));
  REQUIRE(pool.take(0, pages));
  std::ranges::sort(pages);
  CHECK(pages == std::vector<std::int32_t>{0, 1, 2, 3});
}

TEST_CASE("a page is free when its last holder lets go") {
  PagePool pool(1);
  std::vector<std::int32_t> pages;
  REQUIRE(pool.take(1, pages));
  pool.retain(0);
  CHECK(pool.references(0) == 2);
  pool.release(0);
  CHECK(pool.free() == 0);
  pool.release(0);
  CHECK(pool.free() == 1);
  CHECK(pool.references(0) == 0);
  test::refused([&] { pool.release(0); }, ErrorCode::internal, {"page 0", "too often"});
  CHECK(pool.free() == 1);
}

TEST_CASE("an empty pool") {
  PagePool pool(0);
  std::vector<std::int32_t> pages;
  CHECK(pool.size() == 0);
  CHECK_FALSE(pool.take(1, pages));
  CHECK(pool.take(0, pages));
}

}  // namespace imp
