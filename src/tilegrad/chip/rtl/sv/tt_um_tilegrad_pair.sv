// Two int8 multipliers of the mesh in a row, for Tiny Tapeout. `ui_in` is a byte, `uio_in` says what
// to do with it: bits 2:0 the command (0 nothing, 1 and 2 set the weight of the left and the right
// multiplier, 3 multiply and add, 4 clear both sums), bits 5:3 which byte of the sums `uo_out` shows
// (0 to 3 the left, 4 to 7 the right, the lowest first). The right multiplier sees an input one
// cycle after the left, as in the mesh.

module tt_um_tilegrad_pair (
    input  wire [7:0] ui_in,
    output wire [7:0] uo_out,
    input  wire [7:0] uio_in,
    output wire [7:0] uio_out,
    output wire [7:0] uio_oe,
    input  wire       ena,
    input  wire       clk,
    input  wire       rst_n
);
  logic [7:0] left_weight, right_weight;
  wire [7:0] passed, unused_inputs, unused_left, unused_right;
  wire [1:0] unused_index, unused_index_right;
  wire [31:0] left_sum, right_sum;
  wire rst = !rst_n;
  wire [2:0] command = uio_in[2:0];
  wire clear = command == 3'd4;
  wire [7:0] data = command == 3'd3 ? ui_in : 8'd0;
  always_ff @(posedge clk) begin
    if (rst) begin
      left_weight <= 8'd0;
      right_weight <= 8'd0;
    end else begin
      if (command == 3'd1) left_weight <= ui_in;
      if (command == 3'd2) right_weight <= ui_in;
    end
  end
  npu_pe #(.SUMS_STAY(1)) left_pe (
      .clk(clk), .rst(rst), .load(1'b0), .clear(clear), .drain(1'b0),
      .mixed(1'b0), .left(data),
      .above(left_weight), .above_index(2'd0), .above_sum(32'd0), .inputs(passed),
      .still(unused_left), .index(unused_index), .sum(left_sum));
  npu_pe #(.SUMS_STAY(1)) right_pe (
      .clk(clk), .rst(rst), .load(1'b0), .clear(clear), .drain(1'b0),
      .mixed(1'b0), .left(passed),
      .above(right_weight), .above_index(2'd0), .above_sum(32'd0), .inputs(unused_inputs),
      .still(unused_right), .index(unused_index_right), .sum(right_sum));
  wire [63:0] sums = {right_sum, left_sum};
  assign uo_out = sums[{uio_in[5:3], 3'd0}+:8];
  assign uio_out = 8'd0;
  assign uio_oe = 8'd0;
  wire unused = &{1'b0, ena, uio_in[7:6], unused_inputs, unused_left, unused_right, unused_index,
      unused_index_right};
endmodule
