# Golden numbers for fedstat's intraclass correlations, from R's psych.
#   Rscript tests/golden/icc.R tests/golden/icc.json
# x is (rater, target): one unit's weights for every client. "shrout_fleiss" is table 2 of Shrout and Fleiss (1979).
# The data are kept with the numbers. Levels other than 95 % are asked for by psych's alpha.
suppressMessages({library(psych); library(jsonlite)})
out <- commandArgs(trailingOnly = TRUE)[1]
RNGkind("Mersenne-Twister", "Inversion", "Rejection")
set.seed(20260401)

case <- function(name, x, level = .95) {
  found <- ICC(as.data.frame(t(x)), lmer = FALSE, alpha = 1 - level)
  r <- found$results
  list(
    name = name, level = level, x = unname(x), type = as.character(r$type), icc = r$ICC, statistic = r$F, df1 = r$df1, df2 = r$df2,
    p_value = r$p, conf_low = r$`lower bound`, conf_high = r$`upper bound`,
    mean_squares = unname(found$stats[3, 1:3])
  )
}
noisy <- function(raters, targets, signal, offset = 0) {
  outer(rep(1, raters), signal * rnorm(targets)) + offset * rnorm(raters) + matrix(rnorm(raters * targets), raters)
}
shrout_fleiss <- t(matrix(c(9, 2, 5, 8, 6, 1, 3, 2, 8, 4, 6, 8, 7, 1, 2, 6, 10, 5, 6, 9, 6, 2, 4, 7), ncol = 4, byrow = TRUE))

write_json(list(
  versions = list(R = R.version.string, psych = as.character(packageVersion("psych"))),
  method = "psych::ICC(lmer = FALSE)", tolerance = 1e-10,
  cases = list(
    case("shrout_fleiss", shrout_fleiss),
    case("agree", noisy(10, 30, 2)), case("agree, level .9", noisy(7, 25, 1.5), level = .9),
    case("independent", noisy(8, 40, 0)), case("offsets of clients", noisy(6, 20, 1, offset = 3)),
    case("two clients", noisy(2, 12, 1)), case("two weights", noisy(9, 2, 3)), case("many clients", noisy(100, 5, .3)),
    case("negative", {x <- noisy(3, 15, 0); x - .5 * outer(rep(1, 3), colMeans(x))}),
    case("conv", noisy(20, 25, .1, offset = .2))
  )
), out, digits = NA, auto_unbox = TRUE)
